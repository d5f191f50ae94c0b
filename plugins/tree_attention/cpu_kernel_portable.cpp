#include "plugins/tree_attention/cpu_kernel.hpp"

namespace trtree::attention {

const TileKernel kPortableTile = attend_tile;

}  // namespace trtree::attention
