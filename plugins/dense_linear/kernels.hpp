// The kernels of one instruction set; input rows of float32.
#pragma once

#include "plugins/linear_job.hpp"

namespace trtree::dense {

struct Kernels {
  LinearKernel bf16;
  LinearKernel fp16;
  LinearKernel float32;
};

extern const Kernels kPortableKernels;
#ifdef TRTREE_X86_KERNELS
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace trtree::dense
