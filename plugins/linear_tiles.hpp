// The loops around a linear kernel, for one instruction set. Included by translation
// units that are compiled for it, so nothing here may have external linkage: the
// linker would be free to give its copy to code that runs on any CPU.
//
// A policy P says how one segment of K is reduced:
//   P::Sum    16 float32 columns
//   P::kRows  most rows per pass over a tile's weights
//   P::segment<R>(sums, tile, begin, end, input, job)   adds blocks [begin, end) of R rows
//   P::zero(), P::add(a, b), P::finish(sum, scale, bias or nullptr, n), P::store(sum, out, n)
#pragma once

#include <cstdint>

#include "plugins/linear_job.hpp"

namespace trtree {
namespace {

template <typename P, int R>
void reduce_rows(const LinearJob& job, const uint8_t* tile, int64_t column, int64_t row) {
  using Sum = typename P::Sum;
  const LinearOutput& output = job.output;
  const uint8_t* input = job.input + row * job.input_stride;
  float* out = output.data + row * output.row_stride + column;
  const int64_t left = job.columns - column;
  const int64_t n = left < kTileColumns ? left : kTileColumns;
  Sum totals[R];
  for (Sum& total : totals) total = P::zero();
  for (int s = 0; s < job.segments.count; ++s) {
    Sum sums[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[r] = P::zero();
    P::template segment<R>(sums, tile, job.segments.bounds[s], job.segments.bounds[s + 1], input,
                           job);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) totals[r] = P::add(totals[r], sums[r]);
    if (output.segment_stride == 0) continue;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      P::store(sums[r], out + r * output.row_stride + s * output.segment_stride, n);
    }
  }
  if (output.segment_stride != 0) return;
  const float* bias = job.bias == nullptr ? nullptr : job.bias + column;
  for (int r = 0; r < R; ++r) {
    P::store(P::finish(totals[r], job.scale, bias, n), out + r * output.row_stride, n);
  }
}

// Finds the instance for `rows`, which is at most R.
template <typename P, int R>
void dispatch_rows(const LinearJob& job, const uint8_t* tile, int64_t column, int64_t row,
                   int64_t rows) {
  if constexpr (R > 1) {
    if (rows < R) return dispatch_rows<P, R - 1>(job, tile, column, row, rows);
  }
  reduce_rows<P, R>(job, tile, column, row);
}

template <typename P>
void run_linear(const LinearJob& job) {
  const uint8_t* tile = job.weight;
  for (int64_t column = 0; column < job.columns; column += kTileColumns) {
    // As few passes over the tile as can be, each of about as many rows.
    int64_t passes = (job.rows + P::kRows - 1) / P::kRows;
    for (int64_t row = 0; row < job.rows; --passes) {
      const int64_t rows = (job.rows - row + passes - 1) / passes;
      dispatch_rows<P, P::kRows>(job, tile, column, row, rows);
      row += rows;
    }
    tile += job.tile_bytes;
  }
}

}  // namespace
}  // namespace trtree
