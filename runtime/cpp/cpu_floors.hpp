// What no linear can go below on this CPU: reading the weights once, and the
// instructions that the arithmetic cannot do without.
#pragma once

#include <cstdint>
#include <span>

#include "plugins/parallel.hpp"

namespace trtree::bench {

// Seconds for all threads together to read `bytes` once.
double time_read(std::span<const uint8_t> bytes, Parallel& parallel);

// The arithmetic of one block of 16 columns x 16 of K, for one row:
enum class BlockKind {
  kW4A4,   // 4 dot products, a conversion, a product of scales, a multiply-add
  kW4A16,  // 8 dot products, a multiply-add
  kDense,  // 16 multiply-adds
};

// Seconds for all threads together to do that `blocks` times from registers. Negative if
// the CPU lacks AVX-512, as this floor is not known for other kernels.
double time_blocks(BlockKind kind, int64_t blocks, Parallel& parallel);

// Compiled for AVX-512; the return value only keeps the work from being optimized away.
uint64_t read_avx512(const uint8_t* begin, const uint8_t* end);
void run_blocks_avx512(BlockKind kind, int64_t blocks);

}  // namespace trtree::bench
