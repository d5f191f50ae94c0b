#include "plugins/dense_linear/dense_linear.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "plugins/clones.hpp"
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

// Of a table with one for each type of weights.
template <typename Table>
auto kernel(const Table& table, DType dtype) {
  switch (dtype) {
    case DType::kBf16:
      return table.bf16;
    case DType::kFp16:
      return table.fp16;
    default:
      return table.float32;
  }
}

int64_t tile_bytes(int64_t in_features, DType dtype) {
  const int64_t bytes = in_features * kTileColumns * element_size(dtype);
  return (bytes + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
}

template <typename T>
TRTREE_CLONES T largest_bits(const T* x, int64_t n, T magnitude) {
  T largest = 0;
  for (int64_t i = 0; i < n; ++i) {
    const T bits = x[i] & magnitude;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

template <typename Element, typename T>
float largest_of(std::span<const StoredRows> parts, int64_t in_features) {
  constexpr T kMagnitude = static_cast<T>(~T{0}) >> 1;
  T largest = 0;
  for (const StoredRows& part : parts) {
    for (int64_t r = 0; r < part.rows; ++r) {
      const auto* row = reinterpret_cast<const T*>(part.data + r * part.stride);
      largest = std::max(largest, largest_bits(row, in_features, kMagnitude));
    }
  }
  return Element::load(__builtin_bit_cast(typename Element::Storage, largest));
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

bool pack(std::span<const StoredRows> weight, int64_t in_features, DType dtype, int64_t first,
          int64_t end, std::span<uint8_t> packed, Isa isa) {
  const int64_t size = element_size(dtype);
  check_tiles("dense", weight, in_features, first, end, packed.size(),
              packed_size(end - first, in_features, dtype));
  const PackKernel pack_tile = kernel(kernels(isa).pack, dtype);
  const std::vector<uint8_t> zeros(in_features * size);
  const int64_t bytes = tile_bytes(in_features, dtype);
  const int64_t padding = bytes - kTileColumns * in_features * size;
  bool finite = true;
  for (int64_t o = first; o < end; o += kTileColumns) {
    TileRows rows;
    tile_rows(weight, o, zeros.data(), rows);
    uint8_t* const tile = packed.data() + (o - first) / kTileColumns * bytes;
    finite = pack_tile(rows, in_features, tile) && finite;
    std::fill_n(tile + bytes - padding, padding, uint8_t{0});
  }
  return finite;
}

float largest_magnitude(std::span<const StoredRows> weight, int64_t in_features, DType dtype) {
  return dtype == DType::kBf16   ? largest_of<Bf16, uint16_t>(weight, in_features)
         : dtype == DType::kFp16 ? largest_of<Fp16, uint16_t>(weight, in_features)
                                 : largest_of<Float32, uint32_t>(weight, in_features);
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
