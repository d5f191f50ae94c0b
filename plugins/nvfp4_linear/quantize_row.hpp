// Rounding of weights, the arithmetic of format.quantize_weight to the last bit, as loops
// that the compiler vectorizes. Internal linkage for the reason given in linear_tiles.hpp.
#pragma once

#include <cstdint>

#include "plugins/dense_linear/element.hpp"
#include "plugins/nvfp4_linear/kernels.hpp"
#include "plugins/nvfp4_linear/prepare_row.hpp"

namespace trtree::nvfp4 {
namespace {

// Nearest e4m3, ties to even, of a number from 2^-9 to 448: as a float and its bits.
inline float round_scale(float scale, uint8_t& bits) {
  const float rounded = round_to(scale, 3, -6);
  const uint32_t normal = (bits_of(rounded) >> 20) - ((127 - 7) << 3);
  const auto subnormal = static_cast<uint32_t>(static_cast<int32_t>(rounded * 512.0f));
  bits = static_cast<uint8_t>(rounded < 0x1p-6f ? subnormal : normal);
  return rounded;
}

// Nearest E2M1 code; saturates at 6.
inline uint8_t encode(float x) {
  const uint32_t bits = bits_of(x), six = bits_of(6.0f);
  const uint32_t magnitude = bits & kMagnitude;
  const float rounded = round_to(float_of(magnitude < six ? magnitude : six), 1, 0);
  // From 1 on a code is the exponent and the first bit of the mantissa.
  const uint32_t normal = (bits_of(rounded) >> 22) - (126 << 1);
  const auto subnormal = static_cast<uint32_t>(static_cast<int32_t>(rounded * 2.0f));
  const uint32_t code = rounded < 1.0f ? subnormal : normal;
  return static_cast<uint8_t>(code | (bits >> 31) << 3);
}

// K is a multiple of 16.
template <typename Element>
void quantize_weight_row(const uint8_t* row, int64_t k, float global_scale, uint8_t* codes,
                         uint8_t* scales) {
  constexpr int64_t kBatch = 32;  // blocks, so that no step waits for the one before
  using Storage = typename Element::Storage;
  for (int64_t first = 0; first < k / kBlock; first += kBatch) {
    const int64_t left = k / kBlock - first;
    const int64_t n = left < kBatch ? left : kBatch;
    float x[kBatch * kBlock], amax[kBatch], step[kBatch];
    uint8_t wide[kBatch * kBlock];
    for (int64_t i = 0; i < n * kBlock; ++i) {
      Storage value;
      std::memcpy(&value, row + (first * kBlock + i) * sizeof(value), sizeof(value));
      x[i] = Element::load(value);
    }
    for (int64_t b = 0; b < n; ++b) amax[b] = float_of(largest_magnitude(x + b * kBlock));
    for (int64_t b = 0; b < n; ++b) {
      float scale = amax[b] / (6.0f * global_scale);
      scale = scale < 0x1p-9f ? 0x1p-9f : scale;
      scale = scale > 448.0f ? 448.0f : scale;
      step[b] = round_scale(amax[b] == 0.0f ? 1.0f : scale, scales[first + b]) * global_scale;
    }
    for (int64_t b = 0; b < n; ++b) {
      const float divisor = step[b] > 0.0f ? step[b] : 1.0f;
      const uint8_t keep = step[b] > 0.0f ? 0xff : 0;  // a step that underflows gives zeros
#pragma GCC unroll 1
      for (int i = 0; i < kBlock; ++i) {
        wide[b * kBlock + i] = encode(x[b * kBlock + i] / divisor) & keep;
      }
    }
    for (int64_t i = 0; i < n * kBlock / 2; ++i) {
      codes[first * kBlock / 2 + i] = static_cast<uint8_t>(wide[2 * i] | wide[2 * i + 1] << 4);
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
