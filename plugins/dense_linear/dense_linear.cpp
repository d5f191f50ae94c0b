#include "plugins/dense_linear/dense_linear.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "plugins/dense_linear/element.hpp"
#include "plugins/dense_linear/kernels.hpp"

namespace trtree::dense {
namespace {

const Kernels& kernels(Isa isa) {
#ifdef TRTREE_X86_KERNELS
  if (isa == Isa::kAvx512) return kAvx512Kernels;
  if (isa == Isa::kAvx2) return kAvx2Kernels;
#endif
  (void)isa;
  return kPortableKernels;
}

LinearKernel kernel(const Kernels& kernels, DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return kernels.bf16;
    case DType::kFp16:
      return kernels.fp16;
    default:
      return kernels.float32;
  }
}

int64_t tile_bytes(int64_t in_features, DType dtype) {
  const int64_t bytes = in_features * kTileColumns * element_size(dtype);
  return (bytes + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
}

// [columns, K] -> [K, tile's columns].
template <typename T>
void transpose(const uint8_t* from, int64_t columns, int64_t in_features, uint8_t* to) {
  constexpr auto size = static_cast<int64_t>(sizeof(T));
  for (int64_t k = 0; k < in_features; ++k) {
    for (int64_t c = 0; c < columns; ++c) {
      std::memcpy(to + (k * kTileColumns + c) * size, from + (c * in_features + k) * size, size);
    }
  }
}

template <typename Element>
void read_column(const uint8_t* tile, int64_t column, int64_t k, float* out) {
  for (int64_t i = 0; i < k; ++i) {
    typename Element::Storage value;
    std::memcpy(&value, tile + (i * kTileColumns + column) * sizeof(value), sizeof(value));
    out[i] = Element::load(value);
  }
}

}  // namespace

DType dtype_from_name(std::string_view name) {
  if (name == "bfloat16") return DType::kBf16;
  if (name == "float16") return DType::kFp16;
  if (name == "float32") return DType::kFloat32;
  throw std::invalid_argument("dense linear of dtype \"" + std::string(name) +
                              "\": expected bfloat16, float16 or float32");
}

int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

int64_t packed_size(int64_t out_features, int64_t in_features, DType dtype) {
  if (out_features <= 0 || in_features <= 0) {
    throw std::invalid_argument("dense weight " + shape_text(out_features, in_features) +
                                " is empty");
  }
  return (out_features + kTileColumns - 1) / kTileColumns * tile_bytes(in_features, dtype);
}

void pack(std::span<const uint8_t> weight, int64_t out_features, int64_t in_features, DType dtype,
          std::span<uint8_t> packed) {
  const int64_t size = element_size(dtype);
  const int64_t expected = packed_size(out_features, in_features, dtype);
  if (static_cast<int64_t>(packed.size()) != expected ||
      static_cast<int64_t>(weight.size()) != out_features * in_features * size) {
    throw std::invalid_argument("dense weight " + shape_text(out_features, in_features) + " has " +
                                std::to_string(weight.size()) + " bytes, packed " +
                                std::to_string(packed.size()) + "; expected " +
                                std::to_string(out_features * in_features * size) + " and " +
                                std::to_string(expected));
  }
  const int64_t tile = tile_bytes(in_features, dtype);
  for (int64_t o = 0; o < out_features; o += kTileColumns) {
    const int64_t columns = std::min<int64_t>(kTileColumns, out_features - o);
    uint8_t* const to = packed.data() + o / kTileColumns * tile;
    const uint8_t* const from = weight.data() + o * in_features * size;
    const bool padded = columns < kTileColumns || tile != kTileColumns * in_features * size;
    if (padded) std::fill_n(to, tile, uint8_t{0});
    if (size == 2) {
      transpose<uint16_t>(from, columns, in_features, to);
    } else {
      transpose<uint32_t>(from, columns, in_features, to);
    }
  }
}

void Input::assign(const float* x, int64_t rows, int64_t k, int64_t x_stride) {
  const int64_t bytes = k * static_cast<int64_t>(sizeof(float));
  buffer_.resize(rows, bytes);
  in_features_ = k;
  for (int64_t r = 0; r < rows; ++r) std::memcpy(buffer_.row(r), x + r * x_stride, bytes);
}

void linear(const Weight& weight, const Input& input, const LinearOutput& output,
            Parallel& parallel, Isa isa) {
  const int64_t k = weight.in_features;
  check_packed("dense", weight.packed, packed_size(weight.out_features, k, weight.dtype),
               weight.out_features, k);
  const int64_t blocks = (k + kBlock - 1) / kBlock;
  if (input.in_features() != k || weight.segments.bounds[weight.segments.count] != blocks) {
    throw std::invalid_argument("dense linear " + shape_text(weight.out_features, k) +
                                ": the input has K = " + std::to_string(input.in_features()) +
                                ", the segments end at block " +
                                std::to_string(weight.segments.bounds[weight.segments.count]));
  }
  LinearJob job;
  job.weight = weight.packed.data();
  job.tile_bytes = tile_bytes(k, weight.dtype);
  job.in_features = k;
  job.columns = weight.out_features;
  job.input = input.buffer_.row(0);
  job.input_stride = input.buffer_.stride();
  job.rows = input.rows();
  job.segments = weight.segments;
  job.scale = 1.0f;
  job.bias = weight.bias;
  job.output = output;
  run_tiles(job, kernel(kernels(isa), weight.dtype), parallel);
}

void unpack_row(const Weight& weight, int64_t o, float* out) {
  if (o < 0 || o >= weight.out_features) {
    throw std::invalid_argument("dense weight " +
                                shape_text(weight.out_features, weight.in_features) +
                                " has no row " + std::to_string(o));
  }
  const uint8_t* tile =
      weight.packed.data() + o / kTileColumns * tile_bytes(weight.in_features, weight.dtype);
  const int64_t column = o % kTileColumns;
  switch (weight.dtype) {
    case DType::kBf16:
      return read_column<Bf16>(tile, column, weight.in_features, out);
    case DType::kFp16:
      return read_column<Fp16>(tile, column, weight.in_features, out);
    default:
      return read_column<Float32>(tile, column, weight.in_features, out);
  }
}

}  // namespace trtree::dense
