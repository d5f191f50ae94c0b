#include "runtime/cpp/exp_weights_impl.hpp"

namespace trtree {

extern const ExpKernel kExpKernelAvx512;
const ExpKernel kExpKernelAvx512 = {"avx512", row_weights, row_sums};

}  // namespace trtree
