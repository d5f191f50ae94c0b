// Bytes of packed NVFP4 weights and of prepared activations (see README.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "plugins/linear_job.hpp"

namespace trtree::nvfp4 {

// A tile (16 output columns) is a sequence of groups of 4 blocks: 4 x 16 block scales
// (e4m3, one per column), then 4 x 128 bytes of codes.
inline constexpr int64_t kGroupBlocks = 4;
inline constexpr int64_t kBlockScales = kTileColumns;
inline constexpr int64_t kBlockCodes = kBlock * kTileColumns / 2;
inline constexpr int64_t kGroupBytes = kGroupBlocks * (kBlockScales + kBlockCodes);

// A block of NVFP4 activations.
struct QuantizedBlock {
  int8_t values[kBlock];  // 2 * e2m1
  int32_t offset;         // -12 * sum of values: kernels multiply weights as 2 * e2m1 + 12 >= 0
  float scale;            // 256 * block scale: kernels read the weights' block scales / 256
};
static_assert(sizeof(QuantizedBlock) == 24 && offsetof(QuantizedBlock, offset) == 16);

// A block of bf16 activations, in the order in which products are added (but for the
// swap within a pair that the instruction makes).
struct Bf16Block {
  uint16_t values[kBlock];  // of elements kBf16Order
};
inline constexpr int kBf16Order[kBlock] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};

namespace {  // internal linkage: also compiled for instruction sets the CPU may lack

inline int64_t scales_offset(int64_t block) {
  return block / kGroupBlocks * kGroupBytes + block % kGroupBlocks * kBlockScales;
}

inline int64_t codes_offset(int64_t block) {
  return block / kGroupBlocks * kGroupBytes + kGroupBlocks * kBlockScales +
         block % kGroupBlocks * kBlockCodes;
}

}  // namespace
}  // namespace trtree::nvfp4
