// The attention of one tile of rows, for one instruction set (see lanes.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plugins/lanes.hpp"
#include "plugins/tree_attention/cpu.hpp"

namespace trtree::attention {

// Rows of one task: enough to share the prefix's pointers and its place in the cache.
inline constexpr int32_t kTileRows = 8;

struct Tile {
  const Segment* segment;
  int32_t first_row;  // within the segment
  int32_t num_rows;   // at most kTileRows
  int64_t kv_head;
};

// One query: a row and one of the heads that share a KV head.
struct Query {
  const float* q;
  float* out;
  float* weights;   // scores, then unnormalised probabilities, over the visible list
  int64_t visible;  // keys in the list
  float total;      // of the probabilities
};

// A thread's storage, kept from tile to tile.
struct Scratch {
  std::vector<const float*> prefix;
  std::vector<const float*> keys;
  std::vector<float> weights;
  std::vector<Query> queries;
};

using TileKernel = void (*)(const Attention& attention, const Tile& tile, Scratch& scratch);

extern const TileKernel kPortableTile;
#ifdef TRTREE_X86_KERNELS
extern const TileKernel kAvx2Tile;
extern const TileKernel kAvx512Tile;
#endif

namespace {

// Scores of one query against up to four keys.
inline void score(const Query& query, const float* const (&keys)[4], int count, int64_t d,
                  float scale, float* scores) {
  Lanes totals[4] = {};
  for (int64_t i = 0; i < d; i += kLanes) {
    const Lanes q = load(query.q + i);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) totals[k] = fma(q, load(keys[k] + i), totals[k]);
  }
  float sums[4];
  sum4(totals, sums);
  for (int k = 0; k < count; ++k) scores[k] = sums[k] * scale;
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

// C vectors of columns of sum(weight * v) / total over the visible list, for Q queries of
// one row.
template <int Q, int C>
inline void weighted_sum(const Query* queries, const float* const* values, int64_t first) {
  Lanes sums[Q][C] = {};
  for (int64_t key = 0; key < queries->visible; ++key) {
    const float* v = values[key] + first;
#pragma GCC unroll 2
    for (int q = 0; q < Q; ++q) {
      const Lanes weight = fill(queries[q].weights[key]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[q][c] = fma(weight, load(v + c * kLanes), sums[q][c]);
    }
  }
  for (int q = 0; q < Q; ++q) {
    for (int c = 0; c < C; ++c) {
      store(queries[q].out + first + c * kLanes, sums[q][c] / queries[q].total);
    }
  }
}

// As many columns at a time as fit in registers.
template <int Q>
inline void weighted_sums(const Query* queries, const float* const* values, int64_t d) {
  constexpr int kColumns = 4;
  int64_t first = 0;
  for (; first + kColumns * kLanes <= d; first += kColumns * kLanes) {
    weighted_sum<Q, kColumns>(queries, values, first);
  }
  for (; first < d; first += kLanes) weighted_sum<Q, 1>(queries, values, first);
}

// Calls fn(keys, count, index) for the visible keys in groups of four, by position; a
// last group is filled up with its first key.
template <typename Fn>
inline void for_each_four(const float* const* keys, int64_t n, const Fn& fn) {
  for (int64_t i = 0; i < n; i += 4) {
    const int count = n - i < 4 ? static_cast<int>(n - i) : 4;
    const float* four[4];
    for (int k = 0; k < 4; ++k) four[k] = keys[i + (k < count ? k : 0)];
    fn(four, count, i);
  }
}

// The oldest prefix key that a row sees, and the rows of its step that it sees.
inline int64_t clip_to_window(const Attention& attention, const Segment& segment, int32_t row,
                              std::span<const int32_t>& seen) {
  if (attention.window == 0) return 0;
  const int64_t oldest = std::max(0, attention.positions[row] - attention.window + 1);
  while (!seen.empty() && attention.positions[segment.first_row + seen.front()] < oldest) {
    seen = seen.subspan(1);
  }
  return std::min<int64_t>(oldest, segment.prefix_length);
}

// One row and the heads that share a KV head.
inline void attend_row(const Attention& attention, const Tile& tile, int32_t row_in_segment,
                       const float* const* prefix, Scratch& scratch) {
  const PagedKv& cache = attention.cache;
  const Segment& segment = *tile.segment;
  const int64_t d = cache.head_dim;
  const int32_t row = segment.first_row + row_in_segment;
  std::span<const int32_t> seen = attention.visibility->row(row);
  const int64_t start = clip_to_window(attention, segment, row, seen);

  // Keys and values of the visible list: pointers, so that pages cost nothing below.
  std::vector<const float*>& keys = scratch.keys;
  keys.assign(prefix + start, prefix + segment.prefix_length);
  for (const int32_t other : seen) {
    keys.push_back(cache.k + tile.kv_head * d +
                   cache.at(segment.pages, segment.prefix_length + other));
  }
  const auto visible = static_cast<int64_t>(keys.size());
  const auto group = static_cast<int>(attention.query_heads / cache.heads);
  const int64_t stride = (visible + kLanes - 1) / kLanes * kLanes;
  scratch.weights.resize(static_cast<size_t>(stride) * group);
  scratch.queries.clear();
  for (int g = 0; g < group; ++g) {
    const int64_t head = tile.kv_head * group + g;
    scratch.queries.push_back({attention.q.data + row * attention.q.stride + head * d,
                               attention.output + row * attention.output_stride + head * d,
                               scratch.weights.data() + g * stride, visible, 0});
  }
  for_each_four(keys.data(), visible, [&](const float* const(&four)[4], int count, int64_t at) {
    for (const Query& query : scratch.queries) {
      score(query, four, count, d, attention.scale, query.weights + at);
    }
  });
  for (Query& query : scratch.queries) query.total = softmax(query.weights, visible);

  const int64_t values = cache.v - cache.k;
  for (const float*& key : keys) key += values;
  int g = 0;
  for (; g + 2 <= group; g += 2) weighted_sums<2>(&scratch.queries[g], keys.data(), d);
  if (g < group) weighted_sums<1>(&scratch.queries[g], keys.data(), d);
}

inline void attend_tile(const Attention& attention, const Tile& tile, Scratch& scratch) {
  const PagedKv& cache = attention.cache;
  const Segment& segment = *tile.segment;
  scratch.prefix.clear();
  const float* const keys = cache.k + tile.kv_head * cache.head_dim;
  for (int64_t slot = 0; slot < segment.prefix_length; ++slot) {
    scratch.prefix.push_back(keys + cache.at(segment.pages, slot));
  }
  for (int32_t r = 0; r < tile.num_rows; ++r) {
    attend_row(attention, tile, tile.first_row + r, scratch.prefix.data(), scratch);
  }
}

}  // namespace
}  // namespace trtree::attention
