#include "plugins/tree_attention/cpu_kernel.hpp"

namespace trtree::attention {

const TileKernel kAvx512Tile = attend_tile;

}  // namespace trtree::attention
