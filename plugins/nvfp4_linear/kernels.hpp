// The kernels of one instruction set.
#pragma once

#include <cstdint>

#include "plugins/linear_job.hpp"
#include "plugins/nvfp4_linear/layout.hpp"
#include "plugins/stored_rows.hpp"

namespace trtree::nvfp4 {

// A row of k numbers -> codes [k / 2] and block scales [k / 16].
using QuantizeKernel = void (*)(const uint8_t* row, int64_t k, float global_scale, uint8_t* codes,
                                uint8_t* scales);

struct QuantizeKernels {
  QuantizeKernel bf16, fp16, float32;
};

struct Kernels {
  LinearKernel w4a4;   // input rows of QuantizedBlock
  LinearKernel w4a16;  // input rows of Bf16Block
  // One row of k float32 values.
  void (*quantize_row)(const float* x, int64_t k, float input_scale, QuantizedBlock* blocks);
  void (*round_row)(const float* x, int64_t k, Bf16Block* blocks);
  // 16 rows of codes and of block scales -> a tile; whether no scale is negative or NaN.
  bool (*pack_tile)(const TileRows& codes, const TileRows& scales, int64_t blocks, uint8_t* tile);
  QuantizeKernels quantize_weight_row;
};

extern const Kernels kPortableKernels;
#ifdef TRTREE_X86_KERNELS
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace trtree::nvfp4
