// What ranks do between their own ops: add the segment sums of a row-parallel linear, and
// put the columns of a column-parallel one side by side.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plugins/linear_job.hpp"
#include "plugins/parallel.hpp"
#include "runtime/cpp/cpu/collectives.hpp"
#include "runtime/cpp/cpu/row_ops.hpp"

namespace trtree::cpu {

// Buffers are kept between calls.
class RankOps {
 public:
  // collectives may be null: one rank.
  explicit RankOps(Collectives* collectives) : collectives_(collectives) {}

  // Where this rank's linear writes the sums of its own segments.
  LinearOutput segment_sums(int64_t rows, int32_t segments, int64_t columns);

  // Adds the segments of all ranks in the order of K, as one rank's kernel does, so that
  // the result has its bits: (0 + s0 + s1 + ...) * scale + bias. bias may be null.
  void add_segments(float scale, const float* bias, const Matrix& y, Parallel& parallel);

  // x: this rank's columns of y; bounds: of every rank's columns.
  void gather_columns(const Matrix& x, std::span<const int64_t> bounds, const Matrix& y);

 private:
  void gather();

  Collectives* collectives_;
  int32_t segments_ = 0;  // of this rank, in mine_
  std::vector<float> mine_;
  std::vector<float> all_;
};

}  // namespace trtree::cpu
