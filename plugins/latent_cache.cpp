#include "plugins/latent_cache.hpp"

#include <algorithm>
#include <vector>

namespace trtree::latent {

void append(const Cache& cache, std::span<const attention::Segment> segments, const float* x,
            int64_t stride) {
  for (const attention::Segment& segment : segments) {
    for (int32_t row = 0; row < segment.num_rows; ++row) {
      std::copy_n(x + (segment.first_row + row) * stride, cache.dim,
                  cache.at(segment.pages, segment.prefix_length + row));
    }
  }
}

void commit(const Cache& cache, const attention::Segment& segment, std::span<const int32_t> rows) {
  std::vector<float> moved(rows.size() * cache.dim);
  float* to = moved.data();
  for (const int32_t row : rows) {
    to = std::copy_n(cache.at(segment.pages, segment.prefix_length + row), cache.dim, to);
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    std::copy_n(moved.data() + i * cache.dim, cache.dim,
                cache.at(segment.pages, segment.prefix_length + static_cast<int64_t>(i)));
  }
}

}  // namespace trtree::latent
