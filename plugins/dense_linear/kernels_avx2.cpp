#include <immintrin.h>

#include "plugins/dense_linear/kernels.hpp"
#include "plugins/dense_linear/pack_tile.hpp"
#include "plugins/linear_tiles.hpp"
#include "plugins/simd_avx2.hpp"

namespace trtree::dense {
namespace {

// 8 weights as float32.
struct Bf16 {
  static constexpr int64_t kBytes = 2;
  static __m256 load(const uint8_t* from) {
    const __m128i bits = _mm_load_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
};

struct Fp16 {
  static constexpr int64_t kBytes = 2;
  static __m256 load(const uint8_t* from) {
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(from)));
  }
};

struct Float32 {
  static constexpr int64_t kBytes = 4;
  static __m256 load(const uint8_t* from) {
    return _mm256_load_ps(reinterpret_cast<const float*>(from));
  }
};

template <typename Element>
struct Dense : Ymm {
  static constexpr int kRows = 6;

  template <int R>
  static void segment(Sum (&sums)[R], const uint8_t* tile, int64_t begin, int64_t end,
                      const uint8_t* input, const LinearJob& job) {
    end = end * kBlock < job.in_features ? end * kBlock : job.in_features;
    for (int64_t k = begin * kBlock; k < end; ++k) {
      const uint8_t* weights = tile + k * kTileColumns * Element::kBytes;
      const __m256 low = Element::load(weights);
      const __m256 high = Element::load(weights + 8 * Element::kBytes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const auto* x = reinterpret_cast<const float*>(input + r * job.input_stride);
        const __m256 value = _mm256_set1_ps(x[k]);
        sums[r].half[0] = _mm256_fmadd_ps(low, value, sums[r].half[0]);
        sums[r].half[1] = _mm256_fmadd_ps(high, value, sums[r].half[1]);
      }
    }
  }
};

}  // namespace

const Kernels kAvx2Kernels = {run_linear<Dense<Bf16>>, run_linear<Dense<Fp16>>,
                              run_linear<Dense<Float32>>, kPackKernels};

}  // namespace trtree::dense
