#include "plugins/tree_attention/cpu_kernel.hpp"

namespace trtree::attention {

const KernelSet kAvx2Kernels = kKernels;

}  // namespace trtree::attention
