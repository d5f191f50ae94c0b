#include "plugins/sparse_indexer/cpu_kernel.hpp"

namespace trtree::indexer {

const TileKernel kAvx2Tile = score_tile;

}  // namespace trtree::indexer
