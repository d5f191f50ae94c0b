#include "plugins/silu_mul/kernel.hpp"

namespace trtree::silu_mul {

const RowKernel kAvx2Row = silu_mul_row;

}  // namespace trtree::silu_mul
