#include "plugins/nvfp4_linear/nvfp4_linear.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

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

QuantizeKernel quantize_kernel(const QuantizeKernels& kernels, dense::DType dtype) {
  switch (dtype) {
    case dense::DType::kBf16:
      return kernels.bf16;
    case dense::DType::kFp16:
      return kernels.fp16;
    default:
      return kernels.float32;
  }
}

// Names the first of a tile's block scales that is at fault.
[[noreturn]] void refuse_scales(const std::string& name, const TileRows& scales, int64_t row,
                                int64_t blocks) {
  for (int64_t c = 0; c < kTileColumns; ++c) {
    for (int64_t b = 0; b < blocks; ++b) {
      const int scale = scales[c][b];
      if (scale <= 0x80 && scale != 0x7f) continue;
      throw std::invalid_argument(name + ": block scale " + shape_text(row + c, b) +
                                  " is negative or NaN (e4m3 bits " + std::to_string(scale) + ")");
    }
  }
  throw std::logic_error(name + ": no block scale is negative or NaN");
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

void pack(const CodedRows& weight, int64_t in_features, int64_t first, int64_t end,
          std::span<uint8_t> packed, Isa isa) {
  const int64_t out_features = check_tiles("NVFP4", weight.codes, in_features, first, end,
                                           packed.size(), packed_size(end - first, in_features));
  const std::string name = "NVFP4 weight " + shape_text(out_features, in_features);
  if (const int64_t rows = count_rows(weight.block_scales); rows != out_features) {
    throw std::invalid_argument(name + " has " + std::to_string(rows) + " rows of block scales");
  }
  const int64_t blocks = in_features / kBlock;
  const std::vector<uint8_t> zeros(in_features / 2);
  for (int64_t o = first; o < end; o += kTileColumns) {
    TileRows codes, scales;
    tile_rows(weight.codes, o, zeros.data(), codes);
    tile_rows(weight.block_scales, o, zeros.data(), scales);
    uint8_t* const tile = packed.data() + (o - first) / kTileColumns * tile_bytes(in_features);
    if (!kernels(isa).pack_tile(codes, scales, blocks, tile))
      refuse_scales(name, scales, o, blocks);
  }
}

void quantize(std::span<const StoredRows> weight, dense::DType dtype, int64_t in_features,
              float global_scale, int64_t first, int64_t end, std::span<uint8_t> packed, Isa isa) {
  check_tiles("dense", weight, in_features, first, end, packed.size(),
              packed_size(end - first, in_features));
  const QuantizeKernel quantize_row = quantize_kernel(kernels(isa).quantize_weight_row, dtype);
  const int64_t blocks = in_features / kBlock;
  std::vector<uint8_t> codes(kTileColumns * in_features / 2), scales(kTileColumns * blocks);
  const std::vector<uint8_t> zeros(in_features * dense::element_size(dtype));
  TileRows rows, code_rows, scale_rows;
  for (int64_t c = 0; c < kTileColumns; ++c) {
    code_rows[c] = codes.data() + c * in_features / 2;
    scale_rows[c] = scales.data() + c * blocks;
  }
  for (int64_t o = first; o < end; o += kTileColumns) {
    tile_rows(weight, o, zeros.data(), rows);
    const int64_t columns = std::min(kTileColumns, end - o);
    for (int64_t c = 0; c < columns; ++c) {
      quantize_row(rows[c], in_features, global_scale, codes.data() + c * in_features / 2,
                   scales.data() + c * blocks);
    }
    std::fill(codes.begin() + columns * in_features / 2, codes.end(), uint8_t{0});
    std::fill(scales.begin() + columns * blocks, scales.end(), uint8_t{0});
    uint8_t* const tile = packed.data() + (o - first) / kTileColumns * tile_bytes(in_features);
    kernels(isa).pack_tile(code_rows, scale_rows, blocks, tile);
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
