#include "plugins/tree_attention/cpu_kernel.hpp"

namespace trtree::attention {

const KernelSet kPortableKernels = kKernels;

}  // namespace trtree::attention
