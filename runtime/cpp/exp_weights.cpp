#include "runtime/cpp/exp_weights.hpp"

#include <vector>

#include "plugins/cpu_isa.hpp"
#include "runtime/cpp/exp_weights_impl.hpp"

namespace trtree {

#ifdef TRTREE_X86_KERNELS
extern const ExpKernel kExpKernelAvx512;
extern const ExpKernel kExpKernelAvx2;
#endif

std::span<const ExpKernel> exp_kernels() {
  static const std::vector<ExpKernel> kernels = [] {
    std::vector<ExpKernel> usable;
#ifdef TRTREE_X86_KERNELS
    if (best_isa() == Isa::kAvx512) usable.push_back(kExpKernelAvx512);
    if (best_isa() >= Isa::kAvx2) usable.push_back(kExpKernelAvx2);
#endif
    usable.push_back({"portable", row_weights, row_sums});
    return usable;
  }();
  return kernels;
}

}  // namespace trtree
