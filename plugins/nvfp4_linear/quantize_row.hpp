// Rounding of weights, the arithmetic of format.quantize_weight to the last bit, as loops
// that the compiler vectorizes. Internal linkage for the reason given in linear_tiles.hpp.
#pragma once

#include <cstdint>

#include "plugins/dense_linear/element.hpp"
#include "plugins/nvfp4_linear/kernels.hpp"
#include "plugins/nvfp4_linear/prepare_row.hpp"

namespace trtree::nvfp4 {
namespace {

// One of two words, without a branch: conditions on floats keep loops from being vectorized.
inline uint32_t select(bool condition, uint32_t yes, uint32_t no) {
  const uint32_t mask = -static_cast<uint32_t>(condition);
  return (yes & mask) | (no & ~mask);
}

inline int32_t clamp(int32_t x, int32_t low, int32_t high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// e4m3 bits of a rounded number from 2^-9 to 448.
inline uint32_t scale_bits(float rounded) {
  const uint32_t bits = bits_of(rounded);
  const auto subnormal = static_cast<uint32_t>(static_cast<int32_t>(rounded * 512.0f));
  return select(bits < bits_of(0x1p-6f), subnormal, (bits >> 20) - ((127 - 7) << 3));
}

// Nearest E2M1 code; saturates at 6.
inline uint32_t encode(float x) {
  const uint32_t bits = bits_of(x), six = bits_of(6.0f);
  const uint32_t magnitude = bits & kMagnitude;
  const float rounded = round_to(float_of(magnitude < six ? magnitude : six), 1, 0);
  // Doubled, codes 0 to 4 are themselves; from there they are 2, and from 8 on 4 apart.
  const auto doubled = static_cast<int32_t>(rounded * 2.0f);
  const int32_t code =
      clamp(doubled, 0, 4) + (clamp(doubled, 4, 8) - 4) / 2 + (clamp(doubled, 8, 12) - 8) / 4;
  return static_cast<uint32_t>(code) | (bits >> 31) << 3;
}

// K is a multiple of 16.
template <typename Element>
void quantize_weight_row(const uint8_t* row, int64_t k, float global_scale, uint8_t* codes,
                         uint8_t* scales) {
  constexpr int64_t kBatch = 32;  // blocks, so that no step waits for the one before
  const auto kLeast = static_cast<int32_t>(bits_of(0x1p-9f));
  const auto kMost = static_cast<int32_t>(bits_of(448.0f));
  using Storage = typename Element::Storage;
  for (int64_t first = 0; first < k / kBlock; first += kBatch) {
    const int64_t left = k / kBlock - first;
    const int64_t n = left < kBatch ? left : kBatch;
    float x[kBatch * kBlock], amax[kBatch], step[kBatch];
    uint32_t wide[kBatch * kBlock], scale8[kBatch];
    uint8_t narrow[kBatch * kBlock];
    for (int64_t i = 0; i < n * kBlock; ++i) {
      Storage value;
      std::memcpy(&value, row + (first * kBlock + i) * sizeof(value), sizeof(value));
      x[i] = Element::load(value);
    }
    for (int64_t b = 0; b < n; ++b) amax[b] = float_of(largest_magnitude(x + b * kBlock));
    for (int64_t b = 0; b < n; ++b) {
      const uint32_t scale = bits_of(amax[b] / (6.0f * global_scale));
      const int32_t clamped = clamp(static_cast<int32_t>(scale), kLeast, kMost);
      const uint32_t given = select(bits_of(amax[b]) == 0, bits_of(1.0f), clamped);
      const float rounded = round_to(float_of(given), 3, -6);
      step[b] = rounded * global_scale;
      scale8[b] = scale_bits(rounded);
    }
    for (int64_t b = 0; b < n; ++b) {
      scales[first + b] = static_cast<uint8_t>(scale8[b]);
      const uint32_t step_bits = bits_of(step[b]);  // of a step that underflows: 0, and so codes
      const float divisor = float_of(select(step_bits == 0, bits_of(1.0f), step_bits));
      const uint32_t keep = select(step_bits == 0, 0, 15);
#pragma GCC unroll 1
      for (int i = 0; i < kBlock; ++i) {
        wide[b * kBlock + i] = encode(x[b * kBlock + i] / divisor) & keep;
      }
    }
    for (int64_t i = 0; i < n * kBlock; ++i) narrow[i] = static_cast<uint8_t>(wide[i]);
    for (int64_t i = 0; i < n * kBlock / 2; ++i) {
      codes[first * kBlock / 2 + i] = static_cast<uint8_t>(narrow[2 * i] | narrow[2 * i + 1] << 4);
    }
  }
}

constexpr QuantizeKernels kQuantizeKernels = {
    quantize_weight_row<dense::Bf16>,
    quantize_weight_row<dense::Fp16>,
    quantize_weight_row<dense::Float32>,
};

}  // namespace
}  // namespace trtree::nvfp4
