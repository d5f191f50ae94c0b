// exp((logit - max) * scale) in float64 over a row of logits: what a token weighs in a
// draw, before all are divided by their sum.
#pragma once

#include <cstdint>
#include <span>

namespace trtree {

inline constexpr int32_t kWeightChunk = 64;  // logits that share one sum

struct ExpKernel {
  const char* name;
  // weights [count]. max >= every logit, and finite; scale > 0. A logit of max weighs
  // exactly 1; exponents below -708 and logits of -inf weigh 0.
  void (*weights)(const float* logits, int32_t count, double max, double scale, double* weights);
  // sums [ceil(count / kWeightChunk)] of the weights of each chunk.
  void (*sums)(const float* logits, int32_t count, double max, double scale, double* sums);
};

// The kernels this processor can run, fastest first. All give the same bits: nothing is
// fused, and weight i of a chunk goes to accumulator i % 8.
std::span<const ExpKernel> exp_kernels();

}  // namespace trtree
