// The attention of one tile of rows, for one instruction set (see lanes.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plugins/lanes.hpp"
#include "plugins/tree_attention/cpu.hpp"

namespace trtree::attention {

// Rows that share their loads of the prefix, and the heads of a group likewise.
inline constexpr int32_t kTileRows = 4;

struct Tile {
  const Segment* segment;
  int32_t first_row;  // within the segment
  int32_t num_rows;   // at most kTileRows
  int64_t kv_head;
};

using TileKernel = void (*)(const Attention& attention, const Tile& tile,
                            std::vector<float>& scratch);

extern const TileKernel kPortableTile;
#ifdef TRTREE_X86_KERNELS
extern const TileKernel kAvx2Tile;
extern const TileKernel kAvx512Tile;
#endif

namespace {

// One query: a row and one of the heads that share a KV head.
struct Query {
  const float* q;
  float* out;
  float* weights;     // scores, then unnormalised probabilities, over the visible list
  int64_t first_key;  // the first prefix key that the window lets through
  int64_t visible;    // keys in the list
};

inline float dot(const float* a, const float* b, int64_t n) {
  Lanes total{};
  for (int64_t i = 0; i < n; i += kLanes) total = fma(load(a + i), load(b + i), total);
  return sum(total);
}

// Scores -> exp(score - max), padded with zeros to whole lanes; returns their sum.
inline float softmax(float* weights, int64_t n) {
  const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = n; i < padded; ++i) weights[i] = -INFINITY;
  Lanes highest = load(weights);
  for (int64_t i = kLanes; i < padded; i += kLanes) highest = max(highest, load(weights + i));
  const float top = reduce(highest, [](float a, float b) { return a > b ? a : b; });
  Lanes total{};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const Lanes p = exp_negative(load(weights + i) - top);
    store(weights + i, p);
    total += p;
  }
  return sum(total);
}

// Column lanes of V that are summed in registers at a time.
constexpr int kColumns = 4;

// out[first .. first + C lanes] += weight * v for one key and some queries.
template <int C>
inline void accumulate(const float* v, const float* weight_of, int64_t weight_stride, int queries,
                       Lanes (*sums)[kColumns]) {
  Lanes column[C];
  for (int c = 0; c < C; ++c) column[c] = load(v + c * kLanes);
  for (int i = 0; i < queries; ++i) {
    const Lanes weight = fill(weight_of[i * weight_stride]);
    for (int c = 0; c < C; ++c) sums[i][c] = fma(weight, column[c], sums[i][c]);
  }
}

// The weighted sum of values for the queries of one row, C lanes of columns at `first`.
template <int C>
inline void weighted_sum(const Attention& attention, const Tile& tile,
                         std::span<const int32_t> seen, const Query* queries, int group,
                         int64_t first) {
  const PagedKv& cache = attention.cache;
  const Segment& segment = *tile.segment;
  const float* values = cache.v + tile.kv_head * cache.head_dim + first;
  const int64_t stride = group > 1 ? queries[1].weights - queries[0].weights : 0;
  constexpr int kQueries = 8;  // a group is done in parts of at most this many
  for (int done = 0; done < group; done += kQueries) {
    const int count = std::min(kQueries, group - done);
    Lanes sums[kQueries][kColumns] = {};
    const float* weights = queries[done].weights;
    for (int64_t key = queries[done].first_key; key < segment.prefix_length; ++key) {
      accumulate<C>(values + cache.at(segment.pages, key), weights++, stride, count, sums);
    }
    for (const int32_t row : seen) {
      const int64_t slot = segment.prefix_length + row;
      accumulate<C>(values + cache.at(segment.pages, slot), weights++, stride, count, sums);
    }
    for (int i = 0; i < count; ++i) {
      for (int c = 0; c < C; ++c) {
        store(queries[done + i].out + first + c * kLanes, sums[i][c]);
      }
    }
  }
}

inline void attend_tile(const Attention& attention, const Tile& tile, std::vector<float>& scratch) {
  const PagedKv& cache = attention.cache;
  const Segment& segment = *tile.segment;
  const int64_t d = cache.head_dim;
  const auto group = static_cast<int>(attention.query_heads / cache.heads);
  const int64_t longest = segment.prefix_length + segment.num_rows;
  const int64_t stride = (longest + kLanes - 1) / kLanes * kLanes;
  scratch.resize(static_cast<size_t>(stride) * tile.num_rows * group);

  thread_local std::vector<Query> queries;
  queries.clear();
  int64_t first_key = segment.prefix_length;  // the least of the tile's
  std::span<const int32_t> seen[kTileRows];
  for (int32_t r = 0; r < tile.num_rows; ++r) {
    const int32_t row = segment.first_row + tile.first_row + r;
    // Rows of the step are never beyond a window: it is wider than any tree or block is
    // deep, except in a long prompt, where the list of seen rows is cut below.
    const int64_t oldest =
        attention.window > 0 ? std::max(0, attention.positions[row] - attention.window + 1) : 0;
    seen[r] = attention.visibility->row(row);
    while (!seen[r].empty() && attention.positions[segment.first_row + seen[r].front()] < oldest) {
      seen[r] = seen[r].subspan(1);
    }
    const int64_t start = std::min<int64_t>(oldest, segment.prefix_length);
    first_key = std::min(first_key, start);
    for (int g = 0; g < group; ++g) {
      const int64_t head = tile.kv_head * group + g;
      queries.push_back({attention.q.data + row * attention.q.stride + head * d,
                         attention.output + row * attention.output_stride + head * d,
                         scratch.data() + queries.size() * stride, start,
                         segment.prefix_length - start + static_cast<int64_t>(seen[r].size())});
    }
  }

  const float* keys = cache.k + tile.kv_head * d;
  for (int64_t key = first_key; key < segment.prefix_length; ++key) {
    const float* k = keys + cache.at(segment.pages, key);
    for (const Query& query : queries) {
      if (key < query.first_key) continue;
      query.weights[key - query.first_key] = dot(query.q, k, d) * attention.scale;
    }
  }
  for (int32_t r = 0; r < tile.num_rows; ++r) {
    const Query* own = queries.data() + static_cast<size_t>(r) * group;
    int64_t at = segment.prefix_length - own->first_key;
    for (const int32_t row : seen[r]) {
      const float* k = keys + cache.at(segment.pages, segment.prefix_length + row);
      for (int g = 0; g < group; ++g) own[g].weights[at] = dot(own[g].q, k, d) * attention.scale;
      ++at;
    }
    for (int g = 0; g < group; ++g) {
      const float total = softmax(own[g].weights, own[g].visible);
      for (int64_t i = 0; i < own[g].visible; ++i) own[g].weights[i] /= total;
    }
    int64_t first = 0;
    for (; first + kColumns * kLanes <= d; first += kColumns * kLanes) {
      weighted_sum<kColumns>(attention, tile, seen[r], own, group, first);
    }
    for (; first < d; first += kLanes) {
      weighted_sum<1>(attention, tile, seen[r], own, group, first);
    }
  }
}

}  // namespace
}  // namespace trtree::attention
