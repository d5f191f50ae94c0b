// The latent attention of some heads of one row, for one instruction set (see lanes.hpp).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "plugins/mla_attention/cpu.hpp"
#include "plugins/tree_attention/cpu_kernel.hpp"

namespace trtree::mla {

// Heads of one task: they share each latent that comes into the cache.
inline constexpr int64_t kTileHeads = 16;

struct Tile {
  const attention::Segment* segment;
  int32_t row;  // within the segment
  int64_t first_head;
  int64_t num_heads;
};

// A thread's storage, kept from tile to tile.
struct Scratch {
  std::vector<const float*> latents;
  std::vector<float> weights;
  std::vector<attention::Query> queries;
};

using TileKernel = void (*)(const Attention& attention, const Tile& tile, Scratch& scratch);

extern const TileKernel kPortableTile;
#ifdef TRTREE_X86_KERNELS
extern const TileKernel kAvx2Tile;
extern const TileKernel kAvx512Tile;
#endif

namespace {

// Latents that stay in the first-level cache while all heads of a tile read them.
constexpr int64_t kChunkLatents = 16;

inline void find_latents(const Attention& attention, const Tile& tile,
                         std::vector<const float*>& latents) {
  const attention::Segment& segment = *tile.segment;
  const int32_t row = segment.first_row + tile.row;
  latents.clear();
  if (!attention.selection.empty()) {
    for (const int32_t slot : attention.selection.subspan(row * attention.top_k, attention.top_k)) {
      if (slot < 0) break;
      latents.push_back(attention.cache.at(segment.pages, slot));
    }
    return;
  }
  for (int32_t slot = 0; slot < segment.prefix_length; ++slot) {
    latents.push_back(attention.cache.at(segment.pages, slot));
  }
  for (const int32_t other : attention.visibility->row(row)) {
    latents.push_back(attention.cache.at(segment.pages, segment.prefix_length + other));
  }
}

inline void attend_tile(const Attention& attention, const Tile& tile, Scratch& scratch) {
  find_latents(attention, tile, scratch.latents);
  const int64_t d = attention.cache.dim, values = attention.value_dim;
  const auto n = static_cast<int64_t>(scratch.latents.size());
  const int64_t row = tile.segment->first_row + tile.row;
  const int64_t stride = (n + kLanes - 1) / kLanes * kLanes;
  scratch.weights.resize(stride * tile.num_heads);
  scratch.queries.clear();
  for (int64_t i = 0; i < tile.num_heads; ++i) {
    const int64_t head = tile.first_head + i;
    float* const out = attention.output + row * attention.output_stride + head * values;
    std::fill_n(out, values, 0.0f);
    scratch.queries.push_back({attention.q.data + row * attention.q.stride + head * d, out,
                               scratch.weights.data() + i * stride, n, 0});
  }
  if (n == 0) return;  // attends nothing
  const std::span<attention::Query> queries(scratch.queries);
  for (int64_t at = 0; at < n; at += kChunkLatents) {
    attention::score_keys(queries, scratch.latents.data() + at, std::min(kChunkLatents, n - at), at,
                          d, attention.scale);
  }
  for (attention::Query& query : queries) query.total = attention::softmax(query.weights, n);
  for (int64_t at = 0; at < n; at += kChunkLatents) {
    attention::sum_values(queries, scratch.latents.data() + at, std::min(kChunkLatents, n - at), at,
                          values);
  }
  for (const attention::Query& query : queries) {
    for (int64_t i = 0; i < values; i += kLanes) {
      store(query.out + i, load(query.out + i) / query.total);
    }
  }
}

}  // namespace
}  // namespace trtree::mla
