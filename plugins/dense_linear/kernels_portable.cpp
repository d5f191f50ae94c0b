#include <algorithm>
#include <cmath>

#include "plugins/dense_linear/element.hpp"
#include "plugins/dense_linear/kernels.hpp"
#include "plugins/dense_linear/pack_tile.hpp"
#include "plugins/linear_tiles.hpp"
#include "plugins/simd_portable.hpp"

namespace trtree::dense {
namespace {

template <typename Element>
struct Dense : Plain {
  static constexpr int kRows = 4;

  template <int R>
  static void segment(Sum (&sums)[R], const uint8_t* tile, int64_t begin, int64_t end,
                      const uint8_t* input, const LinearJob& job) {
    const auto* weights = reinterpret_cast<const typename Element::Storage*>(tile);
    for (int64_t k = begin * kBlock; k < std::min(end * kBlock, job.in_features); ++k) {
      for (int c = 0; c < kTileColumns; ++c) {
        const float weight = Element::load(weights[k * kTileColumns + c]);
        for (int r = 0; r < R; ++r) {
          const auto* x = reinterpret_cast<const float*>(input + r * job.input_stride);
          sums[r].column[c] = std::fma(weight, x[k], sums[r].column[c]);
        }
      }
    }
  }
};

}  // namespace

const Kernels kPortableKernels = {run_linear<Dense<Bf16>>, run_linear<Dense<Fp16>>,
                                  run_linear<Dense<Float32>>, kPackKernels};

}  // namespace trtree::dense
