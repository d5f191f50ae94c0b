#include "runtime/cpp/cpu/rank_ops.hpp"

#include <algorithm>

namespace trtree::cpu {

LinearOutput RankOps::segment_sums(int64_t rows, int32_t segments, int64_t columns) {
  segments_ = segments;
  mine_.resize(rows * segments * columns);
  return {mine_.data(), segments * columns, columns};
}

void RankOps::add_segments(float scale, const float* bias, const Matrix& y, Parallel& parallel) {
  gather();
  const int64_t row_size = segments_ * y.width;
  const int64_t grain = std::max<int64_t>(1, 65536 / (row_size * collectives_->size()));
  parallel.parallel_for(y.rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* const out = y.row(r);
      std::fill_n(out, y.width, 0.0f);
      for (int32_t rank = 0; rank < collectives_->size(); ++rank) {
        const float* sums = all_.data() + (rank * y.rows + r) * row_size;
        for (int32_t s = 0; s < segments_; ++s, sums += y.width) {
          for (int64_t c = 0; c < y.width; ++c) out[c] += sums[c];
        }
      }
      for (int64_t c = 0; c < y.width; ++c) out[c] *= scale;
      if (bias == nullptr) continue;
      for (int64_t c = 0; c < y.width; ++c) out[c] += bias[c];
    }
  });
}

void RankOps::gather_columns(const Matrix& x, std::span<const int64_t> bounds, const Matrix& y) {
  int64_t widest = 0;
  for (size_t i = 1; i < bounds.size(); ++i) widest = std::max(widest, bounds[i] - bounds[i - 1]);
  mine_.resize(x.rows * widest);
  for (int64_t r = 0; r < x.rows; ++r) {
    std::copy_n(x.row(r), x.width, mine_.data() + r * widest);
  }
  gather();
  for (int64_t r = 0; r < y.rows; ++r) {
    for (size_t rank = 0; rank + 1 < bounds.size(); ++rank) {
      const float* const from = all_.data() + (static_cast<int64_t>(rank) * y.rows + r) * widest;
      std::copy_n(from, bounds[rank + 1] - bounds[rank], y.row(r) + bounds[rank]);
    }
  }
}

void RankOps::gather() {
  all_.resize(mine_.size() * collectives_->size());
  if (!mine_.empty()) collectives_->all_gather(mine_, all_);
}

}  // namespace trtree::cpu
