#include "plugins/causal_conv/cpu.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "plugins/clones.hpp"
#include "plugins/silu_mul/silu_mul.hpp"

namespace trtree::causal_conv {

namespace {

TRTREE_CLONES void add_product(const float* x, const float* weight, int64_t n, float* sum) {
  for (int64_t i = 0; i < n; ++i) sum[i] += x[i] * weight[i];
}

}  // namespace

void run(const Shape& shape, const float* weight, const float* committed,
         std::span<const branch::Segment> segments, const Rows& x, const Rows& y,
         Parallel& parallel, Isa isa) {
  const silu_mul::RowKernel silu = silu_mul::row_kernel(isa);
  const std::vector<float> ones(shape.channels, 1.0f), zeros(shape.channels, 0.0f);
  const int64_t taps = shape.window + 1;
  for (const branch::Segment& segment : segments) {
    const float* const window = committed + segment.slot * shape.state_size();
    parallel.parallel_for(segment.num_rows, 16, [&](int64_t begin, int64_t end) {
      std::vector<const float*> seen(taps);
      std::vector<float> sum(shape.channels);
      for (int64_t row = begin; row < end; ++row) {
        auto at = static_cast<int32_t>(row);
        int64_t outside = shape.window;  // in the window, this far from its oldest
        for (int64_t tap = taps - 1; tap >= 0; --tap) {
          if (at >= 0) {
            seen[tap] = x.data + (segment.first_row + at) * x.stride;
            at = segment.parents[at];
          } else {
            --outside;
            seen[tap] = segment.fresh ? zeros.data() : window + outside * shape.channels;
          }
        }
        std::fill(sum.begin(), sum.end(), 0.0f);
        for (int64_t tap = 0; tap < taps; ++tap) {
          add_product(seen[tap], weight + tap * shape.channels, shape.channels, sum.data());
        }
        silu(sum.data(), ones.data(), shape.channels,
             y.data + (segment.first_row + row) * y.stride);
      }
    });
  }
}

void commit(const Shape& shape, float* committed, const branch::Segment& segment,
            std::span<const int32_t> rows, const Rows& x) {
  if (rows.empty()) return;
  float* const window = committed + segment.slot * shape.state_size();
  if (segment.fresh) std::fill_n(window, shape.state_size(), 0.0f);
  const auto moved = std::min<int64_t>(shape.window, static_cast<int64_t>(rows.size()));
  std::memmove(window, window + moved * shape.channels,
               (shape.window - moved) * shape.channels * sizeof(float));
  for (int64_t i = 0; i < moved; ++i) {
    const int32_t row = rows[rows.size() - moved + i];
    std::copy_n(x.data + (segment.first_row + row) * x.stride, shape.channels,
                window + (shape.window - moved + i) * shape.channels);
  }
}

}  // namespace trtree::causal_conv
