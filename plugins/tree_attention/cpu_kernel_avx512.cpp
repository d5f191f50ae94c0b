#include "plugins/tree_attention/cpu_kernel.hpp"

namespace trtree::attention {

const KernelSet kAvx512Kernels = kKernels;

}  // namespace trtree::attention
