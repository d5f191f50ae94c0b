#include "plugins/sparse_indexer/cpu_kernel.hpp"

namespace trtree::indexer {

const TileKernel kPortableTile = score_tile;

}  // namespace trtree::indexer
