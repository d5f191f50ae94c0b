#include "plugins/sparse_indexer/cpu_kernel.hpp"

namespace trtree::indexer {

const TileKernel kAvx512Tile = score_tile;

}  // namespace trtree::indexer
