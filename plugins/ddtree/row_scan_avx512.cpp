#include "plugins/ddtree/row_scan_impl.hpp"

namespace trtree::ddtree {

extern const ScanKernel kScanKernelAvx512;
const ScanKernel kScanKernelAvx512 = {"avx512", scan_row, chunk_at_least};

}  // namespace trtree::ddtree
