// The kernels of one instruction set.
#pragma once

#include <cstdint>

#include "plugins/linear_job.hpp"
#include "plugins/nvfp4_linear/layout.hpp"

namespace trtree::nvfp4 {

struct Kernels {
  LinearKernel w4a4;   // input rows of QuantizedBlock
  LinearKernel w4a16;  // input rows of Bf16Block
  // One row of k float32 values.
  void (*quantize_row)(const float* x, int64_t k, float input_scale, QuantizedBlock* blocks);
  void (*round_row)(const float* x, int64_t k, Bf16Block* blocks);
};

extern const Kernels kPortableKernels;
#ifdef TRTREE_X86_KERNELS
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace trtree::nvfp4
