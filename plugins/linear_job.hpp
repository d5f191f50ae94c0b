// What every CPU linear has in common: packed weights in tiles of 16 output columns,
// and a reduction over K cut into fixed segments.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace trtree {

inline constexpr int64_t kBlock = 16;        // the unit of K
inline constexpr int64_t kTileColumns = 16;  // the unit of O
inline constexpr int kMaxSegments = 8;
inline constexpr int64_t kPackedAlignment = 64;

// K is reduced in segments, each with its own float32 accumulator, and their sums are
// added in order, so that tensor-parallel ranks can each reduce some of them.
struct Segments {
  int32_t count = 0;
  int32_t bounds[kMaxSegments + 1] = {};  // in blocks: bounds[0] = 0 .. bounds[count]

  // 8 segments, cut at floor(i * blocks / 8).
  static Segments even(int64_t blocks);
  // Throws std::invalid_argument unless `bounds` rise from 0 to `blocks` in 1 to 8
  // steps, some of which may be empty.
  static Segments from_bounds(std::span<const int64_t> bounds, int64_t blocks);
};

// Where a linear writes: float32 [rows, O], or with segment_stride > 0 the sums of each
// segment, [rows, segments, O], before scale and bias. Strides are in floats.
struct LinearOutput {
  float* data;
  int64_t row_stride;
  int64_t segment_stride = 0;
};

// One call of a kernel: consecutive tiles times all rows.
struct LinearJob {
  const uint8_t* weight;  // the first tile
  int64_t tile_bytes;
  int64_t in_features;
  int64_t columns;       // real columns in these tiles; the last tile may be padded
  const uint8_t* input;  // prepared rows
  int64_t input_stride;  // bytes
  int64_t rows;
  Segments segments;
  float scale;
  const float* bias;    // of the first column, or nullptr
  LinearOutput output;  // its data at the first column
};

using LinearKernel = void (*)(const LinearJob&);

class Parallel;

// Spreads the tiles of `job` (which describes the whole linear) over the threads.
void run_tiles(const LinearJob& job, LinearKernel kernel, Parallel& parallel);

std::string shape_text(int64_t rows, int64_t columns);  // "[rows, columns]"

// Throws std::invalid_argument, naming the linear's kind and shape, unless the packed
// bytes are `expected` long and start at a multiple of 64.
void check_packed(std::string_view kind, std::span<const uint8_t> packed, int64_t expected,
                  int64_t out_features, int64_t in_features);

}  // namespace trtree
