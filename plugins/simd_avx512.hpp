// 16 float32 columns in one register, for linear_tiles.hpp.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace trtree {
namespace {

struct Zmm {
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  static Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
  static Sum finish(Sum sum, float scale, const float* bias, int64_t n) {
    sum = _mm512_mul_ps(sum, _mm512_set1_ps(scale));
    return bias == nullptr ? sum : _mm512_add_ps(sum, _mm512_maskz_loadu_ps(first(n), bias));
  }
  static void store(Sum sum, float* out, int64_t n) { _mm512_mask_storeu_ps(out, first(n), sum); }

 private:
  static __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
};

// 4 bytes of any type to every lane.
inline __m512i broadcast32(const void* from) {
  int32_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return _mm512_set1_epi32(bits);
}

}  // namespace
}  // namespace trtree
