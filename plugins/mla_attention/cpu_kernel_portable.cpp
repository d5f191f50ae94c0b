#include "plugins/mla_attention/cpu_kernel.hpp"

namespace trtree::mla {

const TileKernel kPortableTile = attend_tile;

}  // namespace trtree::mla
