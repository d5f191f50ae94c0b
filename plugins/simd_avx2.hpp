// 16 float32 columns in two registers, for linear_tiles.hpp.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace trtree {
namespace {

struct Ymm {
  struct Sum {
    __m256 half[2];
  };
  static Sum zero() { return {{_mm256_setzero_ps(), _mm256_setzero_ps()}}; }
  static Sum add(Sum a, Sum b) {
    return {{_mm256_add_ps(a.half[0], b.half[0]), _mm256_add_ps(a.half[1], b.half[1])}};
  }
  static Sum finish(Sum sum, float scale, const float* bias, int64_t n) {
    for (int h = 0; h < 2; ++h) {
      sum.half[h] = _mm256_mul_ps(sum.half[h], _mm256_set1_ps(scale));
      if (bias == nullptr) continue;
      const __m256 values = _mm256_maskload_ps(bias + 8 * h, first(n - 8 * h));
      sum.half[h] = _mm256_add_ps(sum.half[h], values);
    }
    return sum;
  }
  static void store(Sum sum, float* out, int64_t n) {
    for (int h = 0; h < 2; ++h) {
      _mm256_maskstore_ps(out + 8 * h, first(n - 8 * h), sum.half[h]);
    }
  }

 private:
  static __m256i first(int64_t n) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int32_t>(n)), lanes);
  }
};

// 4 bytes of any type to every lane.
inline __m256i broadcast32(const void* from) {
  int32_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return _mm256_set1_epi32(bits);
}

}  // namespace
}  // namespace trtree
