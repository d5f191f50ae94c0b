#include "plugins/tree_attention/cpu.hpp"

#include <algorithm>
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

void append(const PagedKv& cache, std::span<const Segment> segments, const Heads& k, const Heads& v,
            int64_t begin, int64_t end) {
  const int64_t d = cache.head_dim, apart = cache.page_size * d;  // from head to head
  for (const Segment& segment : segments) {
    const int64_t last = std::min<int64_t>(end, segment.first_row + segment.num_rows);
    for (int64_t row = std::max<int64_t>(begin, segment.first_row); row < last; ++row) {
      const int64_t slot = segment.prefix_length + row - segment.first_row;
      int64_t to = cache.at(segment.pages, slot, 0);
      for (int64_t head = 0; head < cache.heads; ++head, to += apart) {
        std::copy_n(k.data + row * k.stride + head * d, d, cache.k + to);
        std::copy_n(v.data + row * v.stride + head * d, d, cache.v + to);
      }
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
    // As few tiles as can be, each of about as many rows.
    const int32_t parts = (segment.num_rows + kTileRows - 1) / kTileRows;
    const int32_t tile_rows = attention.window > 0 ? 1 : (segment.num_rows + parts - 1) / parts;
    for (int64_t head = 0; head < cache.heads; ++head) {
      for (int32_t row = 0; row < segment.num_rows; row += tile_rows) {
        tiles.push_back({&segment, row, std::min(tile_rows, segment.num_rows - row), head});
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
  const int64_t d = cache.head_dim;
  const size_t bytes = d * sizeof(float);
  std::vector<float> moved(rows.size() * 2 * d);
  for (int64_t head = 0; head < cache.heads; ++head) {  // of each: read all, then write all
    float* to = moved.data();
    for (const int32_t row : rows) {
      const int64_t from = cache.at(segment.pages, segment.prefix_length + row, head);
      std::memcpy(to, cache.k + from, bytes);
      std::memcpy(to + d, cache.v + from, bytes);
      to += 2 * d;
    }
    const float* from = moved.data();
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t at =
          cache.at(segment.pages, segment.prefix_length + static_cast<int64_t>(i), head);
      std::memcpy(cache.k + at, from, bytes);
      std::memcpy(cache.v + at, from + d, bytes);
      from += 2 * d;
    }
  }
}

}  // namespace trtree::attention
