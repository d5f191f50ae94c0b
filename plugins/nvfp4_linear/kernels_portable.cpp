#include <cmath>

#include "plugins/linear_tiles.hpp"
#include "plugins/nvfp4_linear/kernels.hpp"
#include "plugins/nvfp4_linear/pack_tile.hpp"
#include "plugins/nvfp4_linear/prepare_row.hpp"
#include "plugins/nvfp4_linear/quantize_row.hpp"
#include "plugins/simd_portable.hpp"

namespace trtree::nvfp4 {
namespace {

constexpr int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// [element][column] of 2 * e2m1.
using Weights = int8_t[kBlock][kTileColumns];

void decode(const uint8_t* codes, Weights& weights) {
  for (int i = 0; i < kBlockCodes; ++i) {
    const int column = i % 64 / 4;
    const int element = i / 64 * 8 + i % 4;
    weights[element][column] = kDoubled[codes[i] & 15];
    weights[element + 4][column] = kDoubled[codes[i] >> 4];
  }
}

// An e4m3 block scale / 256; the sign bit is clear.
float decode_scale(uint8_t e4m3) {
  const int exponent = e4m3 >> 3;
  const int mantissa = (e4m3 & 7) + (exponent > 0 ? 8 : 0);
  return static_cast<float>(mantissa) *
         float_of(static_cast<uint32_t>(127 - 18 + (exponent > 0 ? exponent : 1)) << 23);
}

struct W4A4 : Plain {
  static constexpr int kRows = 4;

  template <int R>
  static void segment(Sum (&sums)[R], const uint8_t* tile, int64_t begin, int64_t end,
                      const uint8_t* input, const LinearJob& job) {
    for (int64_t b = begin; b < end; ++b) {
      Weights weights;
      decode(tile + codes_offset(b), weights);
      const uint8_t* scales = tile + scales_offset(b);
      const uint8_t* blocks = input + b * static_cast<int64_t>(sizeof(QuantizedBlock));
      for (int r = 0; r < R; ++r) {
        const auto* x = reinterpret_cast<const QuantizedBlock*>(blocks + r * job.input_stride);
        int32_t dots[kTileColumns] = {};
        for (int i = 0; i < kBlock; ++i) {
          for (int c = 0; c < kTileColumns; ++c) dots[c] += weights[i][c] * x->values[i];
        }
        for (int c = 0; c < kTileColumns; ++c) {
          // The product is exact, so that fusing it with the sum would change nothing.
          const float scale = decode_scale(scales[c]) * x->scale;
          sums[r].column[c] += static_cast<float>(dots[c]) * scale;
        }
      }
    }
  }
};

struct W4A16 : Plain {
  static constexpr int kRows = 4;

  template <int R>
  static void segment(Sum (&sums)[R], const uint8_t* tile, int64_t begin, int64_t end,
                      const uint8_t* input, const LinearJob& job) {
    for (int64_t b = begin; b < end; ++b) {
      Weights weights;
      decode(tile + codes_offset(b), weights);
      const uint8_t* scales = tile + scales_offset(b);
      const uint8_t* blocks = input + b * static_cast<int64_t>(sizeof(Bf16Block));
      for (int r = 0; r < R; ++r) {
        const auto* x = reinterpret_cast<const Bf16Block*>(blocks + r * job.input_stride);
        float dots[kTileColumns] = {};
        for (int i = 0; i < kBlock; ++i) {
          // The bf16 dot-product instruction adds the second of a pair first.
          const int place = i ^ 1;
          const float value = float_of(static_cast<uint32_t>(x->values[place]) << 16);
          const int8_t* row = weights[kBf16Order[place]];
          for (int c = 0; c < kTileColumns; ++c) {
            dots[c] = std::fma(value, static_cast<float>(row[c]), dots[c]);
          }
        }
        for (int c = 0; c < kTileColumns; ++c) {
          sums[r].column[c] = std::fma(dots[c], decode_scale(scales[c]), sums[r].column[c]);
        }
      }
    }
  }
};

}  // namespace

const Kernels kPortableKernels = {run_linear<W4A4>, run_linear<W4A16>, quantize_row,
                                  round_row,        pack_tile,         kQuantizeKernels};

}  // namespace trtree::nvfp4
