#include "plugins/ddtree/row_scan_impl.hpp"

namespace trtree::ddtree {

extern const ScanKernel kScanKernelAvx2;
const ScanKernel kScanKernelAvx2 = {"avx2", scan_row, chunk_at_least};

}  // namespace trtree::ddtree
