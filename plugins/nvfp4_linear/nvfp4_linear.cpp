#include "plugins/nvfp4_linear/nvfp4_linear.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "plugins/nvfp4_linear/kernels.hpp"
#include "plugins/nvfp4_linear/layout.hpp"

namespace trtree::nvfp4 {
namespace {

const Kernels& kernels(Isa isa) {
#ifdef TRTREE_X86_KERNELS
  if (isa == Isa::kAvx512) return kAvx512Kernels;
  if (isa == Isa::kAvx2) return kAvx2Kernels;
#endif
  (void)isa;
  return kPortableKernels;
}

void check_multiple(const std::string& what, int64_t k) {
  if (k > 0 && k % kBlock == 0) return;
  throw std::invalid_argument(what + ": K = " + std::to_string(k) +
                              " is not a positive multiple of 16");
}

int64_t tile_bytes(int64_t in_features) {
  const int64_t blocks = in_features / kBlock;
  return (blocks + kGroupBlocks - 1) / kGroupBlocks * kGroupBytes;
}

// The low 4 nibbles of both halves, a byte each.
uint64_t spread(uint64_t nibbles) {
  nibbles &= 0x0000ffff0000ffff;
  nibbles = (nibbles | nibbles << 8) & 0x00ff00ff00ff00ff;
  return (nibbles | nibbles << 4) & 0x0f0f0f0f0f0f0f0f;
}

[[noreturn]] void refuse_scale(const std::string& name, int64_t row, int64_t block, int scale) {
  throw std::invalid_argument(name + ": block scale " + shape_text(row, block) +
                              " is negative or NaN (e4m3 bits " + std::to_string(scale) + ")");
}

// Rows that one thread should prepare before another is worth waking.
int64_t grain(int64_t k) { return std::max<int64_t>(2048 / std::max<int64_t>(k, 1), 1); }

}  // namespace

int64_t packed_size(int64_t out_features, int64_t in_features) {
  const std::string name = "NVFP4 weight " + shape_text(out_features, in_features);
  check_multiple(name, in_features);
  if (out_features <= 0) throw std::invalid_argument(name + " has no rows");
  return (out_features + kTileColumns - 1) / kTileColumns * tile_bytes(in_features);
}

void pack(std::span<const uint8_t> codes, std::span<const uint8_t> block_scales,
          int64_t out_features, int64_t in_features, std::span<uint8_t> packed) {
  const std::string name = "NVFP4 weight " + shape_text(out_features, in_features);
  const auto check_size = [&](const char* what, size_t size, int64_t expected) {
    if (static_cast<int64_t>(size) == expected) return;
    throw std::invalid_argument(name + ": expected " + std::to_string(expected) + " bytes of " +
                                what + ", got " + std::to_string(size));
  };
  check_size("packed weight", packed.size(), packed_size(out_features, in_features));
  check_size("codes", codes.size(), out_features * in_features / 2);
  check_size("block scales", block_scales.size(), out_features * in_features / kBlock);
  const int64_t blocks = in_features / kBlock;
  for (int64_t o = 0; o < out_features; o += kTileColumns) {
    uint8_t* const tile = packed.data() + o / kTileColumns * tile_bytes(in_features);
    const int64_t columns = std::min<int64_t>(kTileColumns, out_features - o);
    const bool padded = columns < kTileColumns || blocks % kGroupBlocks != 0;
    if (padded) std::fill_n(tile, tile_bytes(in_features), uint8_t{0});
    const uint8_t* const scales = block_scales.data() + o * blocks;
    const uint8_t* const rows = codes.data() + o * blocks * kBlock / 2;
    for (int64_t b = 0; b < blocks; ++b) {
      uint8_t* const to = tile + codes_offset(b);
      uint8_t* const to_scales = tile + scales_offset(b);
      for (int64_t c = 0; c < columns; ++c) {
        const uint8_t scale = scales[c * blocks + b];
        if (scale > 0x80 || scale == 0x7f) refuse_scale(name, o + c, b, scale);
        to_scales[c] = scale & 0x7f;
        uint64_t block;
        std::memcpy(&block, rows + (c * blocks + b) * kBlock / 2, sizeof block);
        const uint64_t lines = spread(block) | spread(block >> 16) << 4;
        std::memcpy(to + c * 4, &lines, 4);
        std::memcpy(to + 64 + c * 4, reinterpret_cast<const uint8_t*>(&lines) + 4, 4);
      }
    }
  }
}

void Input::prepare(int64_t rows, int64_t k, std::optional<float> input_scale) {
  if (input_scale && (!std::isfinite(*input_scale) || *input_scale <= 0)) {
    throw std::invalid_argument("input_scale = " + std::to_string(*input_scale) +
                                ": it must be finite and > 0");
  }
  check_multiple("NVFP4 linear's input " + shape_text(rows, k), k);
  const size_t block_bytes = input_scale ? sizeof(QuantizedBlock) : sizeof(Bf16Block);
  buffer_.resize(rows, k / kBlock * static_cast<int64_t>(block_bytes));
  in_features_ = k;
  input_scale_ = input_scale;
}

void Input::set_rows(const float* x, int64_t x_stride, int64_t begin, int64_t end, Isa isa) {
  const Kernels& use = kernels(isa);
  for (int64_t r = begin; r < end; ++r) {
    const float* const from = x + r * x_stride;
    uint8_t* const to = buffer_.row(r);
    if (input_scale_) {
      use.quantize_row(from, in_features_, *input_scale_, reinterpret_cast<QuantizedBlock*>(to));
    } else {
      use.round_row(from, in_features_, reinterpret_cast<Bf16Block*>(to));
    }
  }
}

void Input::set_all(const float* x, int64_t x_stride, Parallel& parallel, Isa isa) {
  parallel.parallel_for(rows(), grain(in_features_), [&](int64_t begin, int64_t end) {
    set_rows(x, x_stride, begin, end, isa);
  });
}

void Input::quantize(const float* x, int64_t rows, int64_t k, int64_t x_stride, float input_scale,
                     Parallel& parallel, Isa isa) {
  prepare(rows, k, input_scale);
  set_all(x, x_stride, parallel, isa);
}

void Input::round_to_bf16(const float* x, int64_t rows, int64_t k, int64_t x_stride,
                          Parallel& parallel, Isa isa) {
  prepare(rows, k, {});
  set_all(x, x_stride, parallel, isa);
}

void Input::quantized_row(int64_t row, int8_t* values, float* block_scales) const {
  const auto* blocks = reinterpret_cast<const QuantizedBlock*>(buffer_.row(row));
  for (int64_t b = 0; b < in_features_ / kBlock; ++b) {
    std::copy_n(blocks[b].values, kBlock, values + b * kBlock);
    block_scales[b] = blocks[b].scale / 256;
  }
}

// Sums are of doubled E2M1 values: of both factors, or of the weights alone. Weights'
// block scales are read / 256, which NVFP4 activations already make up for.
float output_scale(float global_scale, std::optional<float> input_scale) {
  return input_scale ? global_scale * *input_scale * 0.25f : global_scale * 128.0f;
}

void linear(const Weight& weight, const Input& input, const LinearOutput& output,
            Parallel& parallel, Isa isa) {
  const int64_t k = weight.in_features;
  check_packed("NVFP4", weight.packed, packed_size(weight.out_features, k), weight.out_features, k);
  if (input.in_features() != k || weight.segments.bounds[weight.segments.count] != k / kBlock) {
    throw std::invalid_argument("NVFP4 linear " + shape_text(weight.out_features, k) +
                                ": the input has K = " + std::to_string(input.in_features()) +
                                ", the segments end at block " +
                                std::to_string(weight.segments.bounds[weight.segments.count]));
  }
  const bool w4a4 = input.input_scale_.has_value();
  LinearJob job;
  job.weight = weight.packed.data();
  job.tile_bytes = tile_bytes(k);
  job.in_features = k;
  job.columns = weight.out_features;
  job.input = input.buffer_.row(0);
  job.input_stride = input.buffer_.stride();
  job.rows = input.rows();
  job.segments = weight.segments;
  job.scale = output_scale(weight.global_scale, input.input_scale_);
  job.bias = weight.bias;
  job.output = output;
  run_tiles(job, w4a4 ? kernels(isa).w4a4 : kernels(isa).w4a16, parallel);
}

}  // namespace trtree::nvfp4
