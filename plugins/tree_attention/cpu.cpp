#include "plugins/tree_attention/cpu.hpp"

#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "plugins/tree_attention/cpu_kernel.hpp"

namespace trtree::attention {

namespace {

TileKernel kernel_of(Isa isa) {
#ifdef TRTREE_X86_KERNELS
  if (isa == Isa::kAvx512) return kAvx512Tile;
  if (isa == Isa::kAvx2) return kAvx2Tile;
#endif
  (void)isa;
  return kPortableTile;
}

}  // namespace

void Visibility::assign(std::span<const Segment> segments, std::span<const int32_t> packed_mask,
                        int32_t mask_words) {
  seen_.clear();
  first_.assign(1, 0);
  for (const Segment& segment : segments) {
    for (int32_t row = 0; row < segment.num_rows; ++row) {
      const int32_t* words =
          packed_mask.data() + static_cast<int64_t>(segment.first_row + row) * mask_words;
      for (int32_t w = 0; w < mask_words; ++w) {
        for (auto bits = static_cast<uint32_t>(words[w]); bits != 0; bits &= bits - 1) {
          seen_.push_back(w * 32 + std::countr_zero(bits));
        }
      }
      first_.push_back(static_cast<int64_t>(seen_.size()));
    }
  }
}

void Visibility::assign_blocks(std::span<const Segment> segments, bool causal) {
  seen_.clear();
  first_.assign(1, 0);
  for (const Segment& segment : segments) {
    for (int32_t row = 0; row < segment.num_rows; ++row) {
      const int32_t end = causal ? row + 1 : segment.num_rows;
      for (int32_t i = 0; i < end; ++i) seen_.push_back(i);
      first_.push_back(static_cast<int64_t>(seen_.size()));
    }
  }
}

void append(const PagedKv& cache, std::span<const Segment> segments, const Heads& k,
            const Heads& v) {
  const size_t bytes = cache.token_floats() * sizeof(float);
  for (const Segment& segment : segments) {
    for (int32_t row = 0; row < segment.num_rows; ++row) {
      const int64_t to = cache.at(segment.pages, segment.prefix_length + row);
      const int64_t from = segment.first_row + row;
      std::memcpy(cache.k + to, k.data + from * k.stride, bytes);
      std::memcpy(cache.v + to, v.data + from * v.stride, bytes);
    }
  }
}

void attend(const Attention& attention, Parallel& parallel, Isa isa) {
  const PagedKv& cache = attention.cache;
  if (cache.head_dim % kLanes != 0) {
    throw std::invalid_argument("tree attention needs a head size that is a multiple of " +
                                std::to_string(kLanes) + ", not " + std::to_string(cache.head_dim));
  }
  std::vector<Tile> tiles;
  for (const Segment& segment : attention.segments) {
    for (int64_t head = 0; head < cache.heads; ++head) {
      for (int32_t row = 0; row < segment.num_rows; row += kTileRows) {
        tiles.push_back({&segment, row, std::min(kTileRows, segment.num_rows - row), head});
      }
    }
  }
  const TileKernel kernel = kernel_of(isa);
  parallel.parallel_for(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    for (int64_t i = begin; i < end; ++i) kernel(attention, tiles[i], scratch);
  });
}

void commit(const PagedKv& cache, const Segment& segment, std::span<const int32_t> rows) {
  const int64_t width = cache.token_floats();
  std::vector<float> moved(rows.size() * 2 * width);  // read all, then write all
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t from = cache.at(segment.pages, segment.prefix_length + rows[i]);
    std::memcpy(moved.data() + 2 * i * width, cache.k + from, width * sizeof(float));
    std::memcpy(moved.data() + (2 * i + 1) * width, cache.v + from, width * sizeof(float));
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t to = cache.at(segment.pages, segment.prefix_length + static_cast<int64_t>(i));
    std::memcpy(cache.k + to, moved.data() + 2 * i * width, width * sizeof(float));
    std::memcpy(cache.v + to, moved.data() + (2 * i + 1) * width, width * sizeof(float));
  }
}

}  // namespace trtree::attention
