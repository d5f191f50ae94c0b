// The row kernel, for one instruction set (see lanes.hpp).
#pragma once

#include "plugins/lanes.hpp"
#include "plugins/silu_mul/silu_mul.hpp"

namespace trtree::silu_mul {

extern const RowKernel kPortableRow;
#ifdef TRTREE_X86_KERNELS
extern const RowKernel kAvx2Row;
extern const RowKernel kAvx512Row;
#endif

namespace {

// sigmoid(g) is 1 / (1 + e) or e / (1 + e) with e = exp(-|g|), so nothing overflows.
inline Lanes silu(const Lanes& gate) {
  const Lanes e = exp_negative(gate < 0.0f ? gate : -gate);
  return gate * ((gate < 0.0f ? e : fill(1.0f)) / (1.0f + e));
}

inline void silu_mul_row(const float* gate, const float* up, int64_t n, float* y) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(y + i, silu(load(gate + i)) * load(up + i));
  if (i == n) return;
  float rest[2][kLanes] = {};
  std::memcpy(rest[0], gate + i, (n - i) * sizeof(float));
  std::memcpy(rest[1], up + i, (n - i) * sizeof(float));
  store(rest[0], silu(load(rest[0])) * load(rest[1]));
  std::memcpy(y + i, rest[0], (n - i) * sizeof(float));
}

}  // namespace
}  // namespace trtree::silu_mul
