#include <immintrin.h>

#include "plugins/dense_linear/kernels.hpp"
#include "plugins/dense_linear/pack_tile.hpp"
#include "plugins/linear_tiles.hpp"
#include "plugins/simd_avx512.hpp"

namespace trtree::dense {
namespace {

// 16 weights as float32.
struct Bf16 {
  static constexpr int64_t kBytes = 2;
  static __m512 load(const uint8_t* from) {
    const __m256i bits = _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
};

struct Fp16 {
  static constexpr int64_t kBytes = 2;
  static __m512 load(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(from)));
  }
};

struct Float32 {
  static constexpr int64_t kBytes = 4;
  static __m512 load(const uint8_t* from) { return _mm512_load_ps(from); }
};

// Weights are read this far ahead (see the NVFP4 kernel).
constexpr int64_t kPrefetchBytes = 2048;

template <typename Element>
struct Dense : Zmm {
  static constexpr int kRows = 12;

  template <int R>
  static void segment(Sum (&sums)[R], const uint8_t* tile, int64_t begin, int64_t end,
                      const uint8_t* input, const LinearJob& job) {
    end = end * kBlock < job.in_features ? end * kBlock : job.in_features;
    for (int64_t k = begin * kBlock; k < end; ++k) {
      const uint8_t* weights = tile + k * kTileColumns * Element::kBytes;
      if constexpr (R > 2) _mm_prefetch(weights + kPrefetchBytes, _MM_HINT_T0);
      const __m512 weight = Element::load(weights);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const auto* x = reinterpret_cast<const float*>(input + r * job.input_stride);
        sums[r] = _mm512_fmadd_ps(weight, _mm512_set1_ps(x[k]), sums[r]);
      }
    }
  }
};

}  // namespace

const Kernels kAvx512Kernels = {run_linear<Dense<Bf16>>, run_linear<Dense<Fp16>>,
                                run_linear<Dense<Float32>>, kPackKernels};

}  // namespace trtree::dense
