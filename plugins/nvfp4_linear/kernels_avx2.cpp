#include <immintrin.h>

#include "plugins/linear_tiles.hpp"
#include "plugins/nvfp4_linear/kernels.hpp"
#include "plugins/nvfp4_linear/pack_tile.hpp"
#include "plugins/nvfp4_linear/prepare_row.hpp"
#include "plugins/nvfp4_linear/quantize_row.hpp"
#include "plugins/simd_avx2.hpp"

namespace trtree::nvfp4 {
namespace {

// Block scales / 256 of 8 columns (see the AVX-512 kernel).
__m256 load_scales(const uint8_t* scales) {
  const __m128i e4m3 = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(scales));
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(e4m3), 7));
}

// Looks up the codes of 8 columns: 4 bytes per lane, elements 4 * quad to 4 * quad + 3.
void decode(const uint8_t* codes, __m128i entries, __m256i (&quads)[4]) {
  const __m256i table = _mm256_broadcastsi128_si256(entries);
  const __m256i nibble = _mm256_set1_epi8(15);
  for (int i = 0; i < 2; ++i) {
    const __m256i line = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes + 64 * i));
    const __m256i high = _mm256_srli_epi16(line, 4);
    quads[2 * i] = _mm256_shuffle_epi8(table, _mm256_and_si256(line, nibble));
    quads[2 * i + 1] = _mm256_shuffle_epi8(table, _mm256_and_si256(high, nibble));
  }
}

struct W4A4 : Ymm {
  static constexpr int kRows = 4;

  template <int R>
  static void segment(Sum (&sums)[R], const uint8_t* tile, int64_t begin, int64_t end,
                      const uint8_t* input, const LinearJob& job) {
    // Code -> 2 * e2m1 + 12.
    const __m128i entries =
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t b = begin; b < end; ++b) {
      const uint8_t* blocks = input + b * static_cast<int64_t>(sizeof(QuantizedBlock));
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        __m256i weights[4];
        decode(tile + codes_offset(b) + 32 * h, entries, weights);
        const __m256 scales = load_scales(tile + scales_offset(b) + 8 * h);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          const auto* x = reinterpret_cast<const QuantizedBlock*>(blocks + r * job.input_stride);
          // Sums of 8 products of at most 24 * 12 stay within 16 bits: nothing saturates.
          __m256i pairs = _mm256_maddubs_epi16(weights[0], broadcast32(x->values));
#pragma GCC unroll 3
          for (int quad = 1; quad < 4; ++quad) {
            pairs = _mm256_add_epi16(
                pairs, _mm256_maddubs_epi16(weights[quad], broadcast32(x->values + 4 * quad)));
          }
          const __m256i dot =
              _mm256_add_epi32(_mm256_madd_epi16(pairs, ones), _mm256_set1_epi32(x->offset));
          const __m256 scale = _mm256_mul_ps(scales, _mm256_set1_ps(x->scale));
          sums[r].half[h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, sums[r].half[h]);
        }
      }
    }
  }
};

struct W4A16 : Ymm {
  static constexpr int kRows = 4;

  template <int R>
  static void segment(Sum (&sums)[R], const uint8_t* tile, int64_t begin, int64_t end,
                      const uint8_t* input, const LinearJob& job) {
    // Code -> 2 * e2m1.
    const __m128i entries = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    for (int64_t b = begin; b < end; ++b) {
      const uint8_t* blocks = input + b * static_cast<int64_t>(sizeof(Bf16Block));
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        __m256i weights[4];
        decode(tile + codes_offset(b) + 32 * h, entries, weights);
        const __m256 scales = load_scales(tile + scales_offset(b) + 8 * h);
        __m256 dots[R];
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) dots[r] = _mm256_setzero_ps();
#pragma GCC unroll 16
        for (int i = 0; i < kBlock; ++i) {
          // The bf16 dot-product instruction adds the second of a pair first.
          const int place = i ^ 1;
          const int element = kBf16Order[place];
          const __m256i top = _mm256_slli_epi32(weights[element / 4], 24 - 8 * (element % 4));
          const __m256 weight = _mm256_cvtepi32_ps(_mm256_srai_epi32(top, 24));
#pragma GCC unroll 4
          for (int r = 0; r < R; ++r) {
            const auto* x = reinterpret_cast<const Bf16Block*>(blocks + r * job.input_stride);
            const __m256i bits = _mm256_set1_epi32(static_cast<int32_t>(x->values[place]) << 16);
            dots[r] = _mm256_fmadd_ps(_mm256_castsi256_ps(bits), weight, dots[r]);
          }
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          sums[r].half[h] = _mm256_fmadd_ps(dots[r], scales, sums[r].half[h]);
        }
      }
    }
  }
};

}  // namespace

const Kernels kAvx2Kernels = {run_linear<W4A4>, run_linear<W4A16>, quantize_row,
                              round_row,        pack_tile,         kQuantizeKernels};

}  // namespace trtree::nvfp4
