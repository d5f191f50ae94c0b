// Latent attention on the CPU over paged float32 latents; README.md says what is computed.
//
// A row's output is a function of its query and of the latents it attends, in the order of
// their positions, and of nothing else: so a tree row gives the bits of plain decoding.
#pragma once

#include <cstdint>
#include <span>

#include "plugins/cpu_isa.hpp"
#include "plugins/latent_cache.hpp"
#include "plugins/parallel.hpp"
#include "plugins/tree_attention/cpu.hpp"

namespace trtree::mla {

struct Attention {
  latent::Cache cache;
  std::span<const attention::Segment> segments;
  const attention::Visibility* visibility = nullptr;
  // [rows, top_k]: slots in rising order, then -1; empty: every visible key.
  std::span<const int32_t> selection;
  int64_t top_k = 0;
  attention::Heads q;  // [rows, heads, cache.dim]
  int64_t heads = 0;
  int64_t value_dim = 0;
  float scale = 1;
  float* output = nullptr;  // [rows, heads, value_dim]
  int64_t output_stride = 0;
};

// Throws std::invalid_argument unless the latents and values are whole multiples of 16 numbers.
void attend(const Attention& attention, Parallel& parallel, Isa isa);

}  // namespace trtree::mla
