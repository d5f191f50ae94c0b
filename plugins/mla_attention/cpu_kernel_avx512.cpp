#include "plugins/mla_attention/cpu_kernel.hpp"

namespace trtree::mla {

const TileKernel kAvx512Tile = attend_tile;

}  // namespace trtree::mla
