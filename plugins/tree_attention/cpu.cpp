#include "plugins/tree_attention/cpu.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

#include "plugins/tree_attention/cpu_kernel.hpp"

namespace trtree::attention {

namespace {

const Kernels& kernels_of(KvType type, Isa isa) {
  const KernelSet* kernels = &kPortableKernels;
#ifdef TRTREE_X86_KERNELS
  if (isa == Isa::kAvx512) kernels = &kAvx512Kernels;
  if (isa == Isa::kAvx2) kernels = &kAvx2Kernels;
#endif
  (void)isa;
  return kernels->of[type == KvType::kE4m3];
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
            int64_t begin, int64_t end, Isa isa) {
  const int64_t d = cache.head_dim, apart = cache.page_size * d;  // from head to head
  const int64_t bytes = item_bytes(cache.type);
  const auto store = kernels_of(cache.type, isa).store;
  for (const Segment& segment : segments) {
    const int64_t last = std::min<int64_t>(end, segment.first_row + segment.num_rows);
    for (int64_t row = std::max<int64_t>(begin, segment.first_row); row < last; ++row) {
      const int64_t slot = segment.prefix_length + row - segment.first_row;
      int64_t to = cache.at(segment.pages, slot, 0);
      for (int64_t head = 0; head < cache.heads; ++head, to += apart) {
        store(k.data + row * k.stride + head * d, d, cache.k_scale, cache.k + to * bytes);
        store(v.data + row * v.stride + head * d, d, cache.v_scale, cache.v + to * bytes);
      }
    }
  }
}

void to_kv(KvType type, const float* x, int64_t n, float scale, std::byte* to, Isa isa) {
  kernels_of(type, isa).store(x, n, scale, to);
}

void from_kv(KvType type, const std::byte* from, int64_t n, float scale, float* x, Isa isa) {
  kernels_of(type, isa).load(from, n, scale, x);
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
  const auto kernel = kernels_of(cache.type, isa).attend;
  parallel.parallel_for(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    for (int64_t i = begin; i < end; ++i) kernel(attention, tiles[i], scratch);
  });
}

void commit(const PagedKv& cache, const Segment& segment, std::span<const int32_t> rows) {
  const int64_t item = item_bytes(cache.type);
  const auto bytes = static_cast<size_t>(cache.head_dim * item);
  std::vector<std::byte> moved(rows.size() * 2 * bytes);
  for (int64_t head = 0; head < cache.heads; ++head) {  // of each: read all, then write all
    std::byte* to = moved.data();
    for (const int32_t row : rows) {
      const int64_t from = cache.at(segment.pages, segment.prefix_length + row, head) * item;
      std::memcpy(to, cache.k + from, bytes);
      std::memcpy(to + bytes, cache.v + from, bytes);
      to += 2 * bytes;
    }
    const std::byte* from = moved.data();
    for (size_t i = 0; i < rows.size(); ++i) {
      const int64_t slot = segment.prefix_length + static_cast<int64_t>(i);
      const int64_t at = cache.at(segment.pages, slot, head) * item;
      std::memcpy(cache.k + at, from, bytes);
      std::memcpy(cache.v + at, from + bytes, bytes);
      from += 2 * bytes;
    }
  }
}

}  // namespace trtree::attention
