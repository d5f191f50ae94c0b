#include "plugins/linear_job.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "plugins/parallel.hpp"
#include "plugins/stored_rows.hpp"

namespace trtree {

Segments Segments::even(int64_t blocks) {
  Segments result;
  result.count = kMaxSegments;
  for (int i = 0; i <= kMaxSegments; ++i) {
    result.bounds[i] = static_cast<int32_t>(i * blocks / kMaxSegments);
  }
  return result;
}

Segments Segments::from_bounds(std::span<const int64_t> bounds, int64_t blocks) {
  const bool fits = bounds.size() >= 2 && bounds.size() <= kMaxSegments + 1 &&
                    bounds.front() == 0 && bounds.back() == blocks &&
                    std::is_sorted(bounds.begin(), bounds.end());
  if (!fits) {
    std::string text;
    for (int64_t bound : bounds) text += (text.empty() ? "" : ", ") + std::to_string(bound);
    throw std::invalid_argument("segment bounds [" + text + "] must rise from 0 to " +
                                std::to_string(blocks) + " blocks in 1 to 8 steps");
  }
  Segments result;
  result.count = static_cast<int32_t>(bounds.size()) - 1;
  std::copy(bounds.begin(), bounds.end(), result.bounds);
  return result;
}

void run_tiles(const LinearJob& job, LinearKernel kernel, Parallel& parallel) {
  // Ranges worth handing to a thread: about a microsecond of streaming.
  constexpr int64_t kRangeBytes = 16384;
  const int64_t tiles = (job.columns + kTileColumns - 1) / kTileColumns;
  const int64_t grain = std::max<int64_t>(kRangeBytes / std::max<int64_t>(job.tile_bytes, 1), 1);
  parallel.parallel_for(tiles, grain, [&](int64_t begin, int64_t end) {
    LinearJob part = job;
    const int64_t column = begin * kTileColumns;
    part.weight += begin * job.tile_bytes;
    part.columns = std::min(end * kTileColumns, job.columns) - column;
    if (part.bias != nullptr) part.bias += column;
    part.output.data += column;
    kernel(part);
  });
}

std::string shape_text(int64_t rows, int64_t columns) {
  std::string text = "[";
  text += std::to_string(rows);
  text += ", ";
  text += std::to_string(columns);
  return text += "]";
}

int64_t count_rows(std::span<const StoredRows> parts) {
  int64_t rows = 0;
  for (const StoredRows& part : parts) rows += part.rows;
  return rows;
}

int64_t check_tiles(std::string_view kind, std::span<const StoredRows> parts, int64_t in_features,
                    int64_t first, int64_t end, size_t packed, int64_t expected) {
  const int64_t rows = count_rows(parts);
  const std::string name = std::string(kind) + " weight " + shape_text(rows, in_features);
  if (first < 0 || first >= end || end > rows || first % kTileColumns != 0 ||
      (end % kTileColumns != 0 && end != rows)) {
    throw std::invalid_argument(name + ": rows " + std::to_string(first) + " to " +
                                std::to_string(end) + " are no tiles of 16 rows");
  }
  if (static_cast<int64_t>(packed) != expected) {
    throw std::invalid_argument(name + ": rows " + std::to_string(first) + " to " +
                                std::to_string(end) + " take " + std::to_string(expected) +
                                " bytes packed, there is room for " + std::to_string(packed));
  }
  return rows;
}

void check_packed(std::string_view kind, std::span<const uint8_t> packed, int64_t expected,
                  int64_t out_features, int64_t in_features) {
  const std::string name =
      "packed " + std::string(kind) + " weight " + shape_text(out_features, in_features);
  if (static_cast<int64_t>(packed.size()) != expected) {
    throw std::invalid_argument(name + ": expected " + std::to_string(expected) + " bytes, got " +
                                std::to_string(packed.size()));
  }
  if (reinterpret_cast<uintptr_t>(packed.data()) % kPackedAlignment != 0) {
    throw std::invalid_argument(name + ": its bytes must start at a multiple of 64");
  }
}

}  // namespace trtree
