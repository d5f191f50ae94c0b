// Sixteen float32 lanes on whatever instruction set the translation unit is compiled for.
// Every operation rounds as IEEE says, fma once, so all of them agree to the bit.
// Internal linkage, for the reason given in linear_tiles.hpp.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace trtree {
namespace {

using Lanes = float __attribute__((vector_size(64)));
using IntLanes = int32_t __attribute__((vector_size(64)));
constexpr int kLanes = 16;

inline Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

inline void store(float* to, const Lanes& lanes) { std::memcpy(to, &lanes, sizeof(lanes)); }

inline Lanes fill(float value) {
  return Lanes{value, value, value, value, value, value, value, value,
               value, value, value, value, value, value, value, value};
}

inline Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  union Halves {
    Lanes whole;
    __m256 half[2];
  };
  const Halves x{a}, y{b}, z{c};
  Halves result;
  for (int i = 0; i < 2; ++i) result.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
  return result.whole;
#else
  Lanes result;
  for (int i = 0; i < kLanes; ++i) result[i] = std::fma(a[i], b[i], c[i]);
  return result;
#endif
}

inline Lanes max(const Lanes& a, const Lanes& b) { return a > b ? a : b; }

// Lane i is folded with lane i + 8, then i + 4, i + 2, i + 1.
template <typename Fold>
inline float reduce(const Lanes& lanes, const Fold& fold) {
  float folded[kLanes];
  std::memcpy(folded, &lanes, sizeof(folded));
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) folded[i] = fold(folded[i], folded[i + half]);
  }
  return folded[0];
}

inline float sum(const Lanes& lanes) {
  return reduce(lanes, [](float a, float b) { return a + b; });
}

#ifdef __AVX2__
// Lane i + lane i + 8.
inline __m256 fold_half(const Lanes& lanes) {
#ifdef __AVX512F__
  return _mm256_add_ps(_mm512_castps512_ps256(lanes),
                       _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(lanes), 1)));
#else
  union Halves {
    Lanes whole;
    __m256 half[2];
  };
  const Halves x{lanes};
  return _mm256_add_ps(x.half[0], x.half[1]);
#endif
}
#endif

// The sums of four vectors at once, each added up in the order of `sum`.
inline void sum4(const Lanes (&lanes)[4], float* sums) {
#ifdef __AVX2__
  __m128 quarter[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256 eight = fold_half(lanes[i]);
    quarter[i] = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  }
  _MM_TRANSPOSE4_PS(quarter[0], quarter[1], quarter[2], quarter[3]);
  _mm_storeu_ps(sums,
                _mm_add_ps(_mm_add_ps(quarter[0], quarter[2]), _mm_add_ps(quarter[1], quarter[3])));
#else
  for (int i = 0; i < 4; ++i) sums[i] = sum(lanes[i]);
#endif
}

// The sums of sixteen vectors at once, each added up in the order of `sum`: result 4 * q + k is
// that of lanes[k][q].
inline Lanes sum16(const Lanes (&lanes)[4][4]) {
  const auto fold8 = [](const Lanes& a, const Lanes& b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30,
                                   31);
  };
  const auto fold4 = [](const Lanes& a, const Lanes& b) {
    return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30,
                                   31);
  };
  const auto fold2 = [](const Lanes& a, const Lanes& b) {
    return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30,
                                   31);
  };
  const auto fold1 = [](const Lanes& a, const Lanes& b) {
    return __builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28,
                                   30) +
           __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
  };
  Lanes quarters[4];  // of each k: 4 lanes for every q
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    quarters[k] = fold4(fold8(lanes[k][0], lanes[k][1]), fold8(lanes[k][2], lanes[k][3]));
  }
  return fold1(fold2(quarters[0], quarters[1]), fold2(quarters[2], quarters[3]));
}

// exp(x) for x <= 0 within 2 units in the last place; 0 below -87.
inline Lanes exp_negative(Lanes x) {
  constexpr float kLog2E = 1.44269504f, kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const IntLanes underflow = x < -87.0f;
  x = underflow ? fill(-87.0f) : x;
  const Lanes n = fma(x, fill(kLog2E), fill(kRound)) - kRound;
  Lanes r = fma(n, fill(-kLn2High), x);
  r = fma(n, fill(-kLn2Low), r);
  // Cephes' expf: exp(r) = 1 + r + r^2 p(r) on |r| <= ln(2) / 2.
  Lanes p = fill(1.9875691500e-4f);
  p = fma(p, r, fill(1.3981999507e-3f));
  p = fma(p, r, fill(8.3334519073e-3f));
  p = fma(p, r, fill(4.1665795894e-2f));
  p = fma(p, r, fill(1.6666665459e-1f));
  p = fma(p, r, fill(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  const IntLanes exponent = (__builtin_convertvector(n, IntLanes) + 127) << 23;
  const Lanes result = p * __builtin_bit_cast(Lanes, exponent);
  return underflow ? Lanes{} : result;
}

}  // namespace
}  // namespace trtree
