#include "plugins/mla_attention/cpu.hpp"

#include <stdexcept>
#include <string>

#include "plugins/mla_attention/cpu_kernel.hpp"

namespace trtree::mla {

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

void attend(const Attention& attention, Parallel& parallel, Isa isa) {
  if (attention.cache.dim % kLanes != 0 || attention.value_dim % kLanes != 0) {
    throw std::invalid_argument("latent attention needs latents and values that are multiples of " +
                                std::to_string(kLanes) + ", not " +
                                std::to_string(attention.cache.dim) + " and " +
                                std::to_string(attention.value_dim));
  }
  std::vector<Tile> tiles;
  for (const attention::Segment& segment : attention.segments) {
    for (int32_t row = 0; row < segment.num_rows; ++row) {
      for (int64_t head = 0; head < attention.heads; head += kTileHeads) {
        tiles.push_back({&segment, row, head, std::min(kTileHeads, attention.heads - head)});
      }
    }
  }
  const TileKernel kernel = kernel_of(isa);
  parallel.parallel_for(static_cast<int64_t>(tiles.size()), 1, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    for (int64_t i = begin; i < end; ++i) kernel(attention, tiles[i], scratch);
  });
}

}  // namespace trtree::mla
