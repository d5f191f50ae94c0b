// A paged float32 cache of one vector per token; plugins/latent_cache.py says what it is.
#pragma once

#include <cstdint>
#include <span>

#include "plugins/tree_attention/cpu.hpp"

namespace trtree::latent {

// One layer's cache: vectors [num_pages, page_size, dim].
struct Cache {
  float* vectors = nullptr;
  int32_t page_size = 0;
  int64_t dim = 0;

  float* at(std::span<const int32_t> pages, int64_t slot) const {
    return vectors + (pages[slot / page_size] * int64_t{page_size} + slot % page_size) * dim;
  }
};

// Write x [rows, dim], `stride` floats between rows, into each row's slot.
void append(const Cache& cache, std::span<const attention::Segment> segments, const float* x,
            int64_t stride);

// Move the slots of the accepted rows (increasing) right behind the prefix.
void commit(const Cache& cache, const attention::Segment& segment, std::span<const int32_t> rows);

}  // namespace trtree::latent
