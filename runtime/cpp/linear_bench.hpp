// Timing of linears as a decoding step runs them.
#pragma once

#include <cstdint>
#include <vector>

#include "plugins/cpu_isa.hpp"
#include "plugins/dense_linear/dense_linear.hpp"
#include "plugins/nvfp4_linear/nvfp4_linear.hpp"
#include "plugins/parallel.hpp"

namespace trtree::bench {

struct StepLinear {
  nvfp4::Weight weight;
  bool same_input;  // as the linear before, whose prepared activations are used again
};

// Seconds for the linears of a step one after the other on `rows` rows, preparing their
// activations included; W4A4, or W4A16 if `bf16`.
double time_step(const std::vector<StepLinear>& linears, int64_t rows, bool bf16,
                 Parallel& parallel, Isa isa);

// Seconds for one dense linear on `rows` rows.
double time_dense(const dense::Weight& weight, int64_t rows, Parallel& parallel, Isa isa);

}  // namespace trtree::bench
