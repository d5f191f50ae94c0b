// The attention of one tile of rows, for one instruction set (see lanes.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

#include "plugins/lanes.hpp"
#include "plugins/tree_attention/cpu.hpp"
#include "plugins/tree_attention/e4m3.hpp"

namespace trtree::attention {

// Rows of one task: enough to share each piece of the prefix that comes into the cache.
inline constexpr int32_t kTileRows = 16;

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
  struct Tail {
    int64_t first;  // in tail_keys
    int64_t count;
  };
  std::vector<const float*> keys;  // the prefix's
  std::vector<const float*> tail_keys;
  std::vector<Tail> tails;  // of each row
  std::vector<float> weights;
  std::vector<Query> queries;
  // E4M3: the prefix's codes, and what a piece of them and the step's own rows decode to.
  std::vector<const uint8_t*> codes;
  std::vector<float> piece, own;
  std::vector<const float*> piece_keys;
};

// What a cache's type and an instruction set choose.
struct Kernels {
  void (*attend)(const Attention& attention, const Tile& tile, Scratch& scratch);
  // n numbers, a multiple of 16 unless they are float32, as the cache has them.
  void (*store)(const float* x, int64_t n, float scale, std::byte* to);
  void (*load)(const std::byte* from, int64_t n, float scale, float* x);
};

// By KvType.
struct KernelSet {
  Kernels of[2];
};

extern const KernelSet kPortableKernels;
#ifdef TRTREE_X86_KERNELS
extern const KernelSet kAvx2Kernels;
extern const KernelSet kAvx512Kernels;
#endif

namespace {

inline void store_scores(float* to, const float* scores, int count) {
  if (count == 4) {
    std::memcpy(to, scores, 4 * sizeof(float));
  } else {
    std::copy_n(scores, count, to);
  }
}

// Scores of four queries against four keys, of which `count` are wanted.
inline void score_four(const Query* queries, const float* const (&keys)[4], int count, int64_t d,
                       float scale, int64_t at) {
  Lanes totals[4][4] = {};
  for (int64_t i = 0; i < d; i += kLanes) {
    Lanes query[4];
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) query[q] = load(queries[q].q + i);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const Lanes key = load(keys[k] + i);
#pragma GCC unroll 4
      for (int q = 0; q < 4; ++q) totals[k][q] = fma(query[q], key, totals[k][q]);
    }
  }
  float scores[kLanes];
  store(scores, sum16(totals) * scale);
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) store_scores(queries[q].weights + at, scores + 4 * q, count);
}

// Likewise of Q queries.
template <int Q>
inline void score(const Query* queries, const float* const (&keys)[4], int count, int64_t d,
                  float scale, int64_t at) {
  Lanes totals[Q][4] = {};
  for (int64_t i = 0; i < d; i += kLanes) {
    Lanes key[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) key[k] = load(keys[k] + i);
#pragma GCC unroll 2
    for (int q = 0; q < Q; ++q) {
      const Lanes query = load(queries[q].q + i);
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) totals[q][k] = fma(query, key[k], totals[q][k]);
    }
  }
#pragma GCC unroll 2
  for (int q = 0; q < Q; ++q) {
    float sums[4];
    sum4(totals[q], sums);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) sums[k] *= scale;
    store_scores(queries[q].weights + at, sums, count);
  }
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

// Into the second-level cache, for the pass over keys that comes next.
inline void prefetch(const float* key, int64_t d) {
  for (int64_t i = 0; i < d; i += kLanes) __builtin_prefetch(key + i, 0, 2);
}

// out[first ...] += weight * v over n keys in order, for Q queries and C vectors of columns.
template <int Q, int C>
inline void accumulate(const Query* queries, const float* const* values, int64_t n, int64_t at,
                       int64_t first, int64_t ahead) {
  Lanes sums[Q][C];
  for (int q = 0; q < Q; ++q) {
    for (int c = 0; c < C; ++c) sums[q][c] = load(queries[q].out + first + c * kLanes);
  }
  for (int64_t key = 0; key < n; ++key) {
    const float* v = values[key] + first;
    if (ahead != 0) prefetch(v + ahead, C * kLanes);
#pragma GCC unroll 4
    for (int q = 0; q < Q; ++q) {
      const Lanes weight = fill(queries[q].weights[at + key]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) sums[q][c] = fma(weight, load(v + c * kLanes), sums[q][c]);
    }
  }
  for (int q = 0; q < Q; ++q) {
    for (int c = 0; c < C; ++c) store(queries[q].out + first + c * kLanes, sums[q][c]);
  }
}

// As many columns at a time as fit in registers.
template <int Q>
inline void accumulate_all(const Query* queries, const float* const* values, int64_t n, int64_t at,
                           int64_t d, int64_t ahead) {
  constexpr int kColumns = 4;
  int64_t first = 0;
  for (; first + kColumns * kLanes <= d; first += kColumns * kLanes) {
    accumulate<Q, kColumns>(queries, values, n, at, first, ahead);
  }
  for (; first < d; first += kLanes) accumulate<Q, 1>(queries, values, n, at, first, ahead);
}

// What `queries` do with keys in list positions at .. at + n, in order: scores, or the
// weighted sum of values. Four queries at a time share their loads. What stands `ahead` of each
// key, if not 0, is fetched meanwhile.
inline void score_keys(std::span<const Query> queries, const float* const* keys, int64_t n,
                       int64_t at, int64_t d, float scale, int64_t ahead = 0) {
  for (int64_t i = 0; i < n; i += 4) {
    const int count = n - i < 4 ? static_cast<int>(n - i) : 4;
    const float* four[4];
    for (int k = 0; k < 4; ++k) four[k] = keys[i + (k < count ? k : 0)];
    if (ahead != 0) {
      for (int k = 0; k < 4; ++k) prefetch(four[k] + ahead, d);
    }
    size_t q = 0;
    for (; q + 4 <= queries.size(); q += 4) score_four(&queries[q], four, count, d, scale, at + i);
    if (q + 2 <= queries.size()) {
      score<2>(&queries[q], four, count, d, scale, at + i);
      q += 2;
    }
    if (q < queries.size()) score<1>(&queries[q], four, count, d, scale, at + i);
  }
}

inline void sum_values(std::span<const Query> queries, const float* const* values, int64_t n,
                       int64_t at, int64_t d, int64_t ahead = 0) {
  size_t q = 0;
  for (; q + 4 <= queries.size(); q += 4, ahead = 0) {
    accumulate_all<4>(&queries[q], values, n, at, d, ahead);
  }
  if (q + 2 <= queries.size()) {
    accumulate_all<2>(&queries[q], values, n, at, d, ahead);
    q += 2;
    ahead = 0;
  }
  if (q < queries.size()) accumulate_all<1>(&queries[q], values, n, at, d, ahead);
}

// Calls use(address) for every slot from `start` to the end of the prefix, page by page.
template <typename T, typename Use>
inline void each_prefix_slot(const Attention& attention, const Tile& tile, const T* base,
                             int64_t start, const Use& use) {
  const PagedKv& cache = attention.cache;
  const Segment& segment = *tile.segment;
  for (int64_t slot = start; slot < segment.prefix_length;) {
    const T* at = base + cache.at(segment.pages, slot, tile.kv_head);
    const int64_t page_end = (slot / cache.page_size + 1) * cache.page_size;
    for (const int64_t end = std::min<int64_t>(page_end, segment.prefix_length); slot < end;
         ++slot, at += cache.head_dim) {
      use(at);
    }
  }
}

// A tile's keys, then its values, as float32. This is a cache of them: they are read in place.
class FloatRows {
 public:
  // Of the prefix, what stays in the first-level cache while all queries of a tile read it.
  static constexpr int64_t kChunk = 64;

  FloatRows(const Attention& attention, const Tile& tile, Scratch& scratch)
      : attention_(attention),
        tile_(tile),
        scratch_(scratch),
        base_(reinterpret_cast<const float*>(attention.cache.k)) {}

  void list_prefix(int64_t start) {
    scratch_.keys.clear();
    each_prefix_slot(attention_, tile_, base_, start,
                     [&](const float* key) { scratch_.keys.push_back(key); });
  }
  // A row of the step, once load_own is called.
  const float* own(int32_t row) {
    const Segment& segment = *tile_.segment;
    return base_ + attention_.cache.at(segment.pages, segment.prefix_length + row, tile_.kv_head);
  }
  void load_own() {}
  // n of the prefix's from list position `at` on.
  const float* const* prefix(int64_t at, int64_t, int64_t) { return scratch_.keys.data() + at; }
  void turn_to_values() {
    const int64_t apart = values_apart();
    for (const float*& key : scratch_.keys) key += apart;
    for (const float*& key : scratch_.tail_keys) key += apart;
  }
  // From a key to its value.
  int64_t values_apart() const {
    return reinterpret_cast<const float*>(attention_.cache.v) - base_;
  }
  // Whether what is `ahead` is to be fetched by who reads the rows.
  static int64_t in_place(int64_t ahead) { return ahead; }
  float score_scale() const { return attention_.scale; }
  Lanes scaled(const Lanes& sum) const { return sum; }

 private:
  const Attention& attention_;
  const Tile& tile_;
  Scratch& scratch_;
  const float* const base_;
};

// Of a cache of E4M3: decoded a piece at a time, the step's own rows once for all of a tile's.
class CodeRows {
 public:
  static constexpr int64_t kChunk = 32;

  CodeRows(const Attention& attention, const Tile& tile, Scratch& scratch)
      : attention_(attention),
        tile_(tile),
        scratch_(scratch),
        d_(attention.cache.head_dim),
        base_(reinterpret_cast<const uint8_t*>(attention.cache.k)) {
    scratch.own.resize(static_cast<size_t>(tile.segment->num_rows * d_));
    scratch.piece.resize(static_cast<size_t>(kChunk * d_));
    scratch.piece_keys.clear();
    for (int64_t i = 0; i < kChunk; ++i) scratch.piece_keys.push_back(&scratch.piece[i * d_]);
  }

  void list_prefix(int64_t start) {
    scratch_.codes.clear();
    each_prefix_slot(attention_, tile_, base_, start,
                     [&](const uint8_t* codes) { scratch_.codes.push_back(codes); });
  }
  const float* own(int32_t row) {
    first_own_ = std::min(first_own_, row);
    last_own_ = std::max(last_own_, row);
    return &scratch_.own[row * d_];
  }
  void load_own() {
    const Segment& segment = *tile_.segment;
    for (int32_t row = first_own_; row <= last_own_; ++row) {
      const int64_t slot = segment.prefix_length + row;
      decode_row(base_ + attention_.cache.at(segment.pages, slot, tile_.kv_head),
                 &scratch_.own[row * d_]);
    }
  }
  const float* const* prefix(int64_t at, int64_t n, int64_t ahead) {
    for (int64_t i = 0; i < n; ++i) {
      const uint8_t* codes = scratch_.codes[at + i];
      if (ahead != 0) {
        for (int64_t byte = 0; byte < d_; byte += 64) {
          __builtin_prefetch(codes + ahead + byte, 0, 2);
        }
      }
      decode_row(codes, &scratch_.piece[i * d_]);
    }
    return scratch_.piece_keys.data();
  }
  void turn_to_values() {
    const int64_t apart = values_apart();
    base_ += apart;
    for (const uint8_t*& codes : scratch_.codes) codes += apart;
    load_own();
  }
  int64_t values_apart() const { return attention_.cache.v - attention_.cache.k; }
  static int64_t in_place(int64_t) { return 0; }
  // One scale for all keys, and one for all values: they are multiplied last.
  float score_scale() const { return attention_.scale * (attention_.cache.k_scale * kCodeUnit); }
  Lanes scaled(const Lanes& sum) const { return sum * (attention_.cache.v_scale * kCodeUnit); }

 private:
  void decode_row(const uint8_t* codes, float* to) const {
    for (int64_t i = 0; i < d_; i += kLanes) store(to + i, decode(codes + i));
  }

  const Attention& attention_;
  const Tile& tile_;
  Scratch& scratch_;
  const int64_t d_;
  const uint8_t* base_;  // of the keys, then of the values
  int32_t first_own_ = INT32_MAX;
  int32_t last_own_ = -1;
};

// Queries of a row stand together. Their lists are the prefix, then the row's tail: the rows of
// its own step that it sees, from position ``oldest`` on.
template <typename Rows>
inline void list_queries(const Attention& attention, const Tile& tile, int64_t oldest,
                         int64_t prefix, Rows& rows, Scratch& scratch) {
  const Segment& segment = *tile.segment;
  const int64_t d = attention.cache.head_dim;
  const auto group = static_cast<size_t>(attention.query_heads / attention.cache.heads);
  scratch.tail_keys.clear();
  scratch.tails.clear();
  scratch.queries.clear();
  const int64_t stride = (prefix + segment.num_rows + kLanes - 1) / kLanes * kLanes;
  scratch.weights.resize(static_cast<size_t>(stride) * tile.num_rows * group);
  for (int32_t r = 0; r < tile.num_rows; ++r) {
    const int32_t row = segment.first_row + tile.first_row + r;
    const auto before = static_cast<int64_t>(scratch.tail_keys.size());
    for (const int32_t other : attention.visibility->row(row)) {
      if (attention.positions[segment.first_row + other] < oldest) continue;
      scratch.tail_keys.push_back(rows.own(other));
    }
    const auto tail = static_cast<int64_t>(scratch.tail_keys.size()) - before;
    scratch.tails.push_back({before, tail});
    for (size_t g = 0; g < group; ++g) {
      const int64_t head = tile.kv_head * static_cast<int64_t>(group) + static_cast<int64_t>(g);
      float* const out = attention.output + row * attention.output_stride + head * d;
      std::fill_n(out, d, 0.0f);
      const int64_t index = static_cast<int64_t>(scratch.queries.size());
      scratch.queries.push_back({attention.q.data + row * attention.q.stride + head * d, out,
                                 scratch.weights.data() + index * stride, prefix + tail, 0});
    }
  }
}

// The rows of a tile share the prefix; a window, which may begin elsewhere for each row,
// has tiles of one row.
template <typename Rows>
inline void attend_tile(const Attention& attention, const Tile& tile, Scratch& scratch) {
  const PagedKv& cache = attention.cache;
  const Segment& segment = *tile.segment;
  const int64_t d = cache.head_dim;
  const auto group = static_cast<size_t>(attention.query_heads / cache.heads);
  Rows rows(attention, tile, scratch);

  int64_t oldest = 0;  // position
  if (attention.window > 0) {
    const int32_t position = attention.positions[segment.first_row + tile.first_row];
    oldest = std::max(0, position - attention.window + 1);
  }
  const int64_t start = std::min<int64_t>(oldest, segment.prefix_length);
  const int64_t prefix = segment.prefix_length - start;
  rows.list_prefix(start);
  list_queries(attention, tile, oldest, prefix, rows, scratch);
  rows.load_own();

  const std::span<Query> queries(scratch.queries);
  const float scale = rows.score_scale();
  const int64_t values = rows.values_apart();
  for (int64_t at = 0; at < prefix; at += Rows::kChunk) {
    const int64_t n = std::min(Rows::kChunk, prefix - at);
    score_keys(queries, rows.prefix(at, n, values), n, at, d, scale, Rows::in_place(values));
  }
  for (size_t r = 0; r < scratch.tails.size(); ++r) {
    const auto [first, count] = scratch.tails[r];
    score_keys(queries.subspan(r * group, group), scratch.tail_keys.data() + first, count, prefix,
               d, scale);
  }
  for (Query& query : queries) query.total = softmax(query.weights, query.visible);

  rows.turn_to_values();
  // The same slots of the next head, which is likely this thread's next tile, follow in a page.
  const int64_t next = tile.kv_head + 1 < cache.heads ? cache.page_size * d - values : 0;
  for (int64_t at = 0; at < prefix; at += Rows::kChunk) {
    const int64_t n = std::min(Rows::kChunk, prefix - at);
    sum_values(queries, rows.prefix(at, n, next), n, at, d, Rows::in_place(next));
  }
  for (size_t r = 0; r < scratch.tails.size(); ++r) {
    const auto [first, count] = scratch.tails[r];
    sum_values(queries.subspan(r * group, group), scratch.tail_keys.data() + first, count, prefix,
               d);
  }
  for (const Query& query : queries) {
    for (int64_t i = 0; i < d; i += kLanes) {
      store(query.out + i, rows.scaled(load(query.out + i) / query.total));
    }
  }
}

inline void store_floats(const float* x, int64_t n, float, std::byte* to) {
  std::memcpy(to, x, n * sizeof(float));
}

inline void store_codes(const float* x, int64_t n, float scale, std::byte* to) {
  for (int64_t i = 0; i < n; i += kLanes) {
    encode(load(x + i), scale, reinterpret_cast<uint8_t*>(to) + i);
  }
}

inline void load_floats(const std::byte* from, int64_t n, float, float* x) {
  std::memcpy(x, from, n * sizeof(float));
}

inline void load_codes(const std::byte* from, int64_t n, float scale, float* x) {
  for (int64_t i = 0; i < n; i += kLanes) {
    store(x + i, decode(reinterpret_cast<const uint8_t*>(from) + i) * (scale * kCodeUnit));
  }
}

constexpr KernelSet kKernels = {{{attend_tile<FloatRows>, store_floats, load_floats},
                                 {attend_tile<CodeRows>, store_codes, load_codes}}};

}  // namespace
}  // namespace trtree::attention
