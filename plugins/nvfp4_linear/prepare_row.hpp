// Rounding of activations, the arithmetic of format.quantize_rows to the last bit.
// Plain loops that the compiler vectorizes for each instruction set; "unroll 1", as
// loops that it unrolls whole are no longer loops when it comes to that. Internal
// linkage for the reason given in linear_tiles.hpp.
#pragma once

#include <cstdint>

#include "plugins/nvfp4_linear/layout.hpp"

namespace trtree::nvfp4 {
namespace {

constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kExponent = 0x7f800000u;

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// x >= 0 rounded to `mantissa_bits`, ties to even, with subnormals under
// 2^min_exponent: adding and subtracting 1.5 * 2^n, with n such that the bits not
// wanted fall off the end of a float.
inline float round_to(float x, uint32_t mantissa_bits, int min_exponent) {
  const uint32_t lowest = static_cast<uint32_t>(127 + min_exponent) << 23;
  uint32_t exponent = bits_of(x) & kExponent;
  exponent = exponent > lowest ? exponent : lowest;
  const float shifter = float_of((exponent + ((23 - mantissa_bits) << 23)) | 0x400000u);
  return (x + shifter) - shifter;
}

// Bits of the largest magnitude; magnitudes compare as integers, with NaN above all.
inline uint32_t largest_magnitude(const float* x) {
  uint32_t largest = 0;
#pragma GCC unroll 1
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & kMagnitude;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

inline void quantize_block(const float* x, float step, QuantizedBlock& out) {
  const bool zero = !(step > 0.0f);
  const float divisor = zero ? 1.0f : step;
  const uint32_t keep = zero ? 0 : ~0u;
  int32_t codes[kBlock];
  int32_t sum = 0;
#pragma GCC unroll 1
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t value = bits_of(x[i] / divisor) & keep;
    uint32_t magnitude = value & kMagnitude;
    const uint32_t six = bits_of(6.0f);
    magnitude = magnitude < six ? magnitude : six;
    const int32_t doubled = static_cast<int32_t>(2.0f * round_to(float_of(magnitude), 1, 0));
    const int32_t sign = static_cast<int32_t>(value) >> 31;
    codes[i] = (doubled ^ sign) - sign;
    sum += codes[i];
  }
#pragma GCC unroll 1
  for (int i = 0; i < kBlock; ++i) out.values[i] = static_cast<int8_t>(codes[i]);
  out.offset = -12 * sum;
}

// Many blocks at a time, so that no step waits for the one before: magnitudes, then
// scales, then codes.
[[maybe_unused]] void quantize_row(const float* x, int64_t k, float input_scale,
                                   QuantizedBlock* blocks) {
  constexpr int64_t kBatch = 32;
  for (int64_t first = 0; first < k / kBlock; first += kBatch) {
    const int64_t left = k / kBlock - first;
    const int64_t n = left < kBatch ? left : kBatch;
    float scales[kBatch];
    for (int64_t b = 0; b < n; ++b) {
      scales[b] = float_of(largest_magnitude(x + (first + b) * kBlock));
    }
    for (int64_t b = 0; b < n; ++b) {
      const float scale = scales[b] / (6.0f * input_scale);
      scales[b] = round_to(scale > 448.0f ? 448.0f : scale, 3, -6);
    }
    for (int64_t b = 0; b < n; ++b) {
      QuantizedBlock& out = blocks[first + b];
      out.scale = 256.0f * scales[b];
      quantize_block(x + (first + b) * kBlock, scales[b] * input_scale, out);
    }
  }
}

// Nearest bf16, ties to even; NaN stays NaN. Magnitudes under 2^-100 become zero: the
// bf16 dot-product instruction takes subnormals as zero, and from there up no product
// or sum of a block can be subnormal.
inline uint16_t to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t nearest = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  const uint32_t quiet = bits >> 16 | 0x40u;
  const uint32_t rounded = magnitude > kExponent ? quiet : nearest;
  constexpr uint32_t kTiny = (127 - 100) << 23;
  return static_cast<uint16_t>(magnitude < kTiny ? 0 : rounded);
}

void round_row(const float* x, int64_t k, Bf16Block* blocks) {
  for (int64_t b = 0; b < k / kBlock; ++b) {
    uint16_t values[kBlock];
#pragma GCC unroll 1
    for (int i = 0; i < kBlock; ++i) values[i] = to_bf16(x[b * kBlock + i]);
    for (int i = 0; i < kBlock; ++i) blocks[b].values[i] = values[kBf16Order[i]];
  }
}

}  // namespace
}  // namespace trtree::nvfp4
