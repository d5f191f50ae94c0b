#include "runtime/cpp/exp_weights_impl.hpp"

namespace trtree {

extern const ExpKernel kExpKernelAvx2;
const ExpKernel kExpKernelAvx2 = {"avx2", row_weights, row_sums};

}  // namespace trtree
