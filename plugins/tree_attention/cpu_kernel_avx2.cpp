#include "plugins/tree_attention/cpu_kernel.hpp"

namespace trtree::attention {

const TileKernel kAvx2Tile = attend_tile;

}  // namespace trtree::attention
