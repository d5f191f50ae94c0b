// Linears with NVFP4 weights on the CPU. README.md defines the arithmetic to the bit
// and the packed layout.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "plugins/cpu_isa.hpp"
#include "plugins/dense_linear/dense_linear.hpp"
#include "plugins/linear_input.hpp"
#include "plugins/linear_job.hpp"
#include "plugins/parallel.hpp"
#include "plugins/stored_rows.hpp"

namespace trtree::nvfp4 {

// Bytes of a packed weight [O, K]. Throws std::invalid_argument if K is not a positive
// multiple of 16 or O is not positive.
int64_t packed_size(int64_t out_features, int64_t in_features);

// A weight as checkpoints store it, in parts that follow one another along O: codes
// [O, K/2] (low nibble = even element) and block scales e4m3 [O, K/16].
struct CodedRows {
  std::span<const StoredRows> codes;
  std::span<const StoredRows> block_scales;
};

// Packs rows `first` to `end`, which are whole tiles but for the weight's end, into `packed`,
// which has packed_size(end - first, K) bytes. The bytes are the same on every instruction
// set. Throws std::invalid_argument if a block scale is negative or NaN, or a size does not fit.
void pack(const CodedRows& weight, int64_t in_features, int64_t first, int64_t end,
          std::span<uint8_t> packed, Isa isa);

// The same of a weight [O, K] of finite numbers, rounded on the way as format.quantize_weight.
void quantize(std::span<const StoredRows> weight, dense::DType dtype, int64_t in_features,
              float global_scale, int64_t first, int64_t end, std::span<uint8_t> packed, Isa isa);

// A view of one linear's weight; the packed bytes start at a multiple of 64.
struct Weight {
  std::span<const uint8_t> packed;
  int64_t out_features = 0;
  int64_t in_features = 0;
  float global_scale = 0;
  Segments segments;
  const float* bias = nullptr;  // [O]
};

// Rows of activations, prepared once for all linears that read them.
class Input {
 public:
  // x float32 [rows, K], `x_stride` floats between rows. W4A4: quantized as
  // format.quantize_rows. Throws std::invalid_argument unless K is a multiple of 16 and
  // input_scale is finite and > 0.
  void quantize(const float* x, int64_t rows, int64_t k, int64_t x_stride, float input_scale,
                Parallel& parallel, Isa isa);
  // W4A16: rounded to bf16, ties to even; magnitudes under 2^-100 become zero.
  void round_to_bf16(const float* x, int64_t rows, int64_t k, int64_t x_stride, Parallel& parallel,
                     Isa isa);
  // The same in two parts: room for all rows, then those of x, all or, for callers that share
  // rows among threads themselves, [begin, end). Without an input_scale they become bf16.
  void prepare(int64_t rows, int64_t k, std::optional<float> input_scale);
  void set_all(const float* x, int64_t x_stride, Parallel& parallel, Isa isa);
  void set_rows(const float* x, int64_t x_stride, int64_t begin, int64_t end, Isa isa);
  // Rows of another input, as they were prepared.
  void select(const Input& from, std::span<const int64_t> rows) {
    buffer_.select(from.buffer_, rows);
    in_features_ = from.in_features_;
    input_scale_ = from.input_scale_;
  }

  int64_t rows() const { return buffer_.rows(); }
  int64_t in_features() const { return in_features_; }
  std::optional<float> input_scale() const { return input_scale_; }  // none: bf16

  // For a quantized row: 2 * e2m1 [K] and block scales [K/16].
  void quantized_row(int64_t row, int8_t* values, float* block_scales) const;

 private:
  friend void linear(const Weight&, const Input&, const LinearOutput&, Parallel&, Isa);

  RowBuffer buffer_;
  int64_t in_features_ = 0;
  std::optional<float> input_scale_;
};

// What the sum over a linear's segments is multiplied by, before the bias is added;
// input_scale: as the input was quantized, none for bf16.
float output_scale(float global_scale, std::optional<float> input_scale);

// y = x W^T * scale + bias into output [rows, O], or the sums of each segment. W4A4 or
// W4A16 as the input was prepared; every output depends on its own row alone, and its
// bits are the same on every instruction set, for any number of rows and threads.
// Throws std::invalid_argument if the shapes or the packed bytes do not fit.
void linear(const Weight& weight, const Input& input, const LinearOutput& output,
            Parallel& parallel, Isa isa);

}  // namespace trtree::nvfp4
