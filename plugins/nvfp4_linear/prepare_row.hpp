// Rounding of activations, the arithmetic of format.quantize_rows to the last bit.
// Plain loops that the compiler vectorizes for each instruction set; internal linkage
// for the reason given in linear_tiles.hpp.
#pragma once

#include <cstdint>

#include "plugins/nvfp4_linear/layout.hpp"

namespace trtree::nvfp4 {
namespace {

inline uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// x >= 0 rounded to `mantissa_bits`, ties to even, with subnormals under
// 2^min_exponent: adding 1.5 * 2^n pushes the bits that go off the end of a float.
inline float round_to(float x, uint32_t mantissa_bits, int min_exponent) {
  const uint32_t lowest = static_cast<uint32_t>(127 + min_exponent) << 23;
  uint32_t exponent = bits_of(x) & 0x7f800000u;
  exponent = exponent > lowest ? exponent : lowest;
  const float shifter = float_of(exponent + ((23 - mantissa_bits) << 23) + 0x400000u);
  return (x + shifter) - shifter;
}

inline void quantize_block(const float* x, float input_scale, QuantizedBlock& out) {
  uint32_t largest = 0;  // magnitudes compare as integers, NaN above all
  for (int i = 0; i < kBlock; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  float scale = float_of(largest) / (6.0f * input_scale);
  scale = round_to(scale > 448.0f ? 448.0f : scale, 3, -6);
  const float step = scale * input_scale;
  int32_t sum = 0;
  if (step > 0.0f) {
    for (int i = 0; i < kBlock; ++i) {
      const float value = x[i] / step;
      float magnitude = float_of(bits_of(value) & 0x7fffffffu);
      magnitude = magnitude < 6.0f ? magnitude : 6.0f;
      const int32_t doubled = static_cast<int32_t>(2.0f * round_to(magnitude, 1, 0));
      const int32_t code = bits_of(value) >> 31 ? -doubled : doubled;
      out.values[i] = static_cast<int8_t>(code);
      sum += code;
    }
  } else {
    for (int8_t& value : out.values) value = 0;
  }
  out.offset = -12 * sum;
  out.scale = 256.0f * scale;
}

void quantize_row(const float* x, int64_t k, float input_scale, QuantizedBlock* blocks) {
  for (int64_t b = 0; b < k / kBlock; ++b) quantize_block(x + b * kBlock, input_scale, blocks[b]);
}

// Nearest bf16, ties to even; NaN stays NaN. Magnitudes under 2^-100 become zero: the
// bf16 dot-product instruction takes subnormals as zero, and from there up no product
// or sum of a block can be subnormal.
inline uint16_t to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
  const uint32_t quiet = bits >> 16 | 0x40u;
  const uint32_t result = magnitude > 0x7f800000u ? quiet : rounded;
  return static_cast<uint16_t>(magnitude < (27u << 23) ? 0 : result);
}

void round_row(const float* x, int64_t k, Bf16Block* blocks) {
  for (int64_t b = 0; b < k / kBlock; ++b) {
    for (int i = 0; i < kBlock; ++i) {
      blocks[b].values[i] = to_bf16(x[b * kBlock + kBf16Order[i]]);
    }
  }
}

}  // namespace
}  // namespace trtree::nvfp4
