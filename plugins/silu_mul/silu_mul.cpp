#include "plugins/silu_mul/silu_mul.hpp"

#include "plugins/silu_mul/kernel.hpp"

namespace trtree::silu_mul {

RowKernel row_kernel(Isa isa) {
#ifdef TRTREE_X86_KERNELS
  if (isa == Isa::kAvx512) return kAvx512Row;
  if (isa == Isa::kAvx2) return kAvx2Row;
#endif
  (void)isa;
  return kPortableRow;
}

}  // namespace trtree::silu_mul
