#include "plugins/mla_attention/cpu_kernel.hpp"

namespace trtree::mla {

const TileKernel kAvx2Tile = attend_tile;

}  // namespace trtree::mla
