// E4M3 codes of keys and values, sixteen at a time (see lanes.hpp); equal bits everywhere.
//
// Format: Micikevicius et al., "FP8 Formats for Deep Learning", arXiv 2209.05433, section 3: a
// sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinities, 0x7f is NaN, 448 the largest.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>

#include "plugins/lanes.hpp"

namespace trtree::attention {
namespace {

using CodeLanes = uint8_t __attribute__((vector_size(16)));

// What ``decode`` leaves to a later product: it gives 2^-8 of a code's value.
constexpr float kCodeUnit = 256.0f;

// x / scale to nearest even, saturated at 448; NaN stays NaN.
inline void encode(const Lanes& x, float scale, uint8_t* codes) {
  constexpr int32_t kSmallest = 127 - 6;  // exponent of the smallest normal number, 2^-6
  const Lanes quotient = x / scale;
  const IntLanes bits = __builtin_bit_cast(IntLanes, quotient);
  const IntLanes nan = quotient != quotient;
  const Lanes absolute = __builtin_bit_cast(Lanes, bits & 0x7fffffff);
  const Lanes magnitude = absolute < 448.0f ? absolute : fill(448.0f);
  IntLanes exponent = __builtin_bit_cast(IntLanes, magnitude) >> 23;
  exponent = exponent > kSmallest ? exponent : IntLanes{} + kSmallest;
  // 1.5 * 2^20 times 2^exponent has the code's last place as its own: adding it rounds.
  const IntLanes round = ((exponent + 20) << 23) | 0x400000;
  const Lanes rounded = magnitude + __builtin_bit_cast(Lanes, round);
  const IntLanes mantissa = __builtin_bit_cast(IntLanes, rounded) - round;
  IntLanes code = ((exponent - kSmallest) << 3) + mantissa;
  code = (nan ? IntLanes{} + 0x7f : code) | ((bits >> 24) & 0x80);
  const CodeLanes narrow = __builtin_convertvector(code, CodeLanes);
  std::memcpy(codes, &narrow, sizeof(narrow));
}

#ifdef __F16C__
// Moved to where half precision has its exponent and mantissa, whose bias is larger by 8.
inline Lanes decode(const uint8_t* codes) {
  const __m256i wide =
      _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
  const __m256i placed = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(~0x4000));
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(placed, _mm256_set1_epi16(0x7fff)),
                                         _mm256_set1_epi16(0x7f << 7));
  const __m256i half = _mm256_or_si256(placed, _mm256_and_si256(nan, _mm256_set1_epi16(0x7c00)));
#ifdef __AVX512F__
  return _mm512_cvtph_ps(half);
#else
  union Halves {
    Lanes whole;
    __m256 half[2];
  };
  Halves result;
  result.half[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
  result.half[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
  return result.whole;
#endif
}
#else
constexpr std::array<float, 256> decoded_codes() {
  std::array<float, 256> values{};
  for (int code = 0; code < 256; ++code) {
    const int exponent = (code >> 3) & 15, mantissa = code & 7;
    float value = static_cast<float>(exponent == 0 ? mantissa : mantissa + 8);
    // Of 2^(exponent - 7 - 3), and of 2^-8 of that.
    for (int i = exponent == 0 ? 1 : exponent; i < 18; ++i) value /= 2;
    if ((code & 0x7f) == 0x7f) value = std::numeric_limits<float>::quiet_NaN();
    values[code] = code < 128 ? value : -value;
  }
  return values;
}

inline Lanes decode(const uint8_t* codes) {
  static constexpr std::array<float, 256> kValues = decoded_codes();
  Lanes result;
  for (int i = 0; i < kLanes; ++i) result[i] = kValues[codes[i]];
  return result;
}
#endif

}  // namespace
}  // namespace trtree::attention
