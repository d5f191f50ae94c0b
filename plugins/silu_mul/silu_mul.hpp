// The gated activation silu(gate) * up on the CPU. Bits are the same on every
// instruction set.
#pragma once

#include <cstdint>

#include "plugins/cpu_isa.hpp"

namespace trtree::silu_mul {

// y[i] = gate[i] / (1 + exp(-gate[i])) * up[i], within a few units in the last place.
using RowKernel = void (*)(const float* gate, const float* up, int64_t n, float* y);

RowKernel row_kernel(Isa isa);

}  // namespace trtree::silu_mul
