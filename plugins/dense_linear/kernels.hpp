// The kernels of one instruction set.
#pragma once

#include "plugins/linear_job.hpp"
#include "plugins/stored_rows.hpp"

namespace trtree::dense {

// 16 rows -> a tile, its padding aside; whether all numbers are finite.
using PackKernel = bool (*)(const TileRows& rows, int64_t in_features, uint8_t* tile);

struct PackKernels {
  PackKernel bf16, fp16, float32;
};

struct Kernels {
  LinearKernel bf16, fp16, float32;  // input rows of float32
  PackKernels pack;
};

extern const Kernels kPortableKernels;
#ifdef TRTREE_X86_KERNELS
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace trtree::dense
