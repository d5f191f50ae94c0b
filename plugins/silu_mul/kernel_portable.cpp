#include "plugins/silu_mul/kernel.hpp"

namespace trtree::silu_mul {

const RowKernel kPortableRow = silu_mul_row;

}  // namespace trtree::silu_mul
