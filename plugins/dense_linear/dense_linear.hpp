// Linears with bf16, fp16 or float32 weights on the CPU. README.md defines the
// arithmetic to the bit and the packed layout.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "plugins/cpu_isa.hpp"
#include "plugins/linear_input.hpp"
#include "plugins/linear_job.hpp"
#include "plugins/parallel.hpp"
#include "plugins/stored_rows.hpp"

namespace trtree::dense {

enum class DType { kBf16, kFp16, kFloat32 };

// "bfloat16", "float16", "float32"; throws std::invalid_argument for any other.
DType dtype_from_name(std::string_view name);
int64_t element_size(DType dtype);

// Bytes of a packed weight [O, K]. Throws std::invalid_argument unless both are positive.
int64_t packed_size(int64_t out_features, int64_t in_features, DType dtype);

// Packs rows `first` to `end` of a weight, [O, K] in parts that follow one another along O;
// they are whole tiles but for the weight's end, and `packed` has packed_size(end - first, K)
// bytes. The bytes are the same on every instruction set. Returns whether all numbers are
// finite. Throws std::invalid_argument if a size does not fit.
bool pack(std::span<const StoredRows> weight, int64_t in_features, DType dtype, int64_t first,
          int64_t end, std::span<uint8_t> packed, Isa isa);

// Of such a weight; infinity or NaN if there are any.
float largest_magnitude(std::span<const StoredRows> weight, int64_t in_features, DType dtype);

// A view of one linear's weight; the packed bytes start at a multiple of 64.
struct Weight {
  std::span<const uint8_t> packed;
  int64_t out_features = 0;
  int64_t in_features = 0;
  DType dtype = DType::kBf16;
  Segments segments;            // of ceil(K / 16) blocks
  const float* bias = nullptr;  // [O]
};

// Rows of float32 activations, laid out for the kernels.
class Input {
 public:
  // x float32 [rows, K], `x_stride` floats between rows.
  void assign(const float* x, int64_t rows, int64_t k, int64_t x_stride);
  // Rows of another input.
  void select(const Input& from, std::span<const int64_t> rows) {
    buffer_.select(from.buffer_, rows);
    in_features_ = from.in_features_;
  }

  int64_t rows() const { return buffer_.rows(); }
  int64_t in_features() const { return in_features_; }

 private:
  friend void linear(const Weight&, const Input&, const LinearOutput&, Parallel&, Isa);
  RowBuffer buffer_;
  int64_t in_features_ = 0;
};

// y = x W^T + bias into output [rows, O], or the sums of each segment. Every output
// depends on its own row alone, and its bits are the same on every instruction set, for
// any number of rows and threads. Throws std::invalid_argument if the shapes or the
// packed bytes do not fit.
void linear(const Weight& weight, const Input& input, const LinearOutput& output,
            Parallel& parallel, Isa isa);

// Row o of the weight as float32 [K]: an embedding that shares the packed lm_head.
void unpack_row(const Weight& weight, int64_t o, float* out);

}  // namespace trtree::dense
