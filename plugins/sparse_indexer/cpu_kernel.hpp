// Scores of some keys for one row, for one instruction set (see lanes.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "plugins/sparse_indexer/cpu.hpp"
#include "plugins/tree_attention/cpu_kernel.hpp"

namespace trtree::indexer {

// Keys of one task.
inline constexpr int64_t kTileKeys = 64;
static_assert(kTileKeys % 16 == 0);  // whole lanes

struct Tile {
  const attention::Segment* segment;
  int32_t row;           // within the segment
  int64_t first, count;  // in the row's list of visible keys: the prefix, then its path
  float* scores;         // of the first; room for whole lanes
};

// A thread's storage, kept from tile to tile.
struct Scratch {
  std::vector<const float*> keys;
  std::vector<float> products;  // [heads, kTileKeys]
  std::vector<attention::Query> queries;
};

using TileKernel = void (*)(const Index& index, const Tile& tile, Scratch& scratch);

extern const TileKernel kPortableTile;
#ifdef TRTREE_X86_KERNELS
extern const TileKernel kAvx2Tile;
extern const TileKernel kAvx512Tile;
#endif

namespace {

// NaN stays NaN.
inline Lanes relu(const Lanes& x) { return Lanes{} > x ? Lanes{} : x; }

inline void score_tile(const Index& index, const Tile& tile, Scratch& scratch) {
  const attention::Segment& segment = *tile.segment;
  const int64_t row = segment.first_row + tile.row, d = index.keys.dim;
  const auto path = index.visibility->row(static_cast<int32_t>(row));
  scratch.keys.clear();
  for (int64_t i = tile.first; i < tile.first + tile.count; ++i) {
    const int64_t prefix = segment.prefix_length;
    const int64_t slot = i < prefix ? i : prefix + path[i - prefix];
    scratch.keys.push_back(index.keys.at(segment.pages, slot));
  }
  scratch.products.resize(index.heads * kTileKeys);
  scratch.queries.clear();
  for (int64_t head = 0; head < index.heads; ++head) {
    scratch.queries.push_back({index.q.data + row * index.q.stride + head * d, nullptr,
                               scratch.products.data() + head * kTileKeys, tile.count, 0});
  }
  attention::score_keys(scratch.queries, scratch.keys.data(), tile.count, 0, d, 1.0f);
  const float* const weights = index.weights.data + row * index.weights.stride;
  for (int64_t i = 0; i < tile.count; i += kLanes) {
    Lanes total{};
    for (int64_t head = 0; head < index.heads; ++head) {
      const Lanes product = load(scratch.products.data() + head * kTileKeys + i);
      total = fma(fill(weights[head]), relu(product), total);
    }
    store(tile.scores + i, total);
  }
}

}  // namespace
}  // namespace trtree::indexer
