#include "plugins/ddtree/row_scan.hpp"

#include <vector>

#include "plugins/ddtree/row_scan_impl.hpp"

namespace trtree::ddtree {

#ifdef TRTREE_X86_KERNELS
extern const ScanKernel kScanKernelAvx512;
extern const ScanKernel kScanKernelAvx2;
#endif

std::span<const ScanKernel> scan_kernels() {
  static const std::vector<ScanKernel> kernels = [] {
    std::vector<ScanKernel> usable;
#ifdef TRTREE_X86_KERNELS
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) {
      usable.push_back(kScanKernelAvx512);
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      usable.push_back(kScanKernelAvx2);
    }
#endif
    // Also what defines the others. Without a fused multiply-add it is slow.
    usable.push_back({"generic", scan_row, chunk_at_least});
    return usable;
  }();
  return kernels;
}

}  // namespace trtree::ddtree
