// Passes over a row of logits: its maximum, the maxima of its chunks, the sum of
// exponentials that log-sum-exp needs, and which logits of a chunk reach a threshold.
#pragma once

#include <cstdint>
#include <span>

namespace trtree::ddtree {

inline constexpr int32_t kChunk = 64;  // logits that share one entry of chunk_max

struct RowScan {
  float max;   // NaNs aside
  double sum;  // of exp(logit - max); NaN when a logit is NaN or +inf
};

struct ScanKernel {
  const char* name;
  // Writes chunk_max [ceil(vocab / kChunk)]. vocab >= 1.
  RowScan (*scan)(const float* logits, int32_t vocab, float* chunk_max);
  // Bit i: chunk[i] >= threshold, for i < kChunk.
  uint64_t (*at_least)(const float* chunk, float threshold);
};

// The kernels this processor can run, fastest first. All give the same bits: logit
// i goes to accumulator i % 16, and every rounding is spelled out, fused
// multiply-adds included.
std::span<const ScanKernel> scan_kernels();

}  // namespace trtree::ddtree
