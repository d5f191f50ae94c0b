#include <immintrin.h>

#include "plugins/linear_tiles.hpp"
#include "plugins/nvfp4_linear/kernels.hpp"
#include "plugins/nvfp4_linear/prepare_row.hpp"
#include "plugins/simd_avx512.hpp"

namespace trtree::nvfp4 {
namespace {

// Weights are read this far ahead. With one or two rows the hardware's own prefetch
// keeps up; with more, the loads are too far apart for it.
constexpr int64_t kPrefetchBytes = 4 * kGroupBytes;

template <int R>
void prefetch(const uint8_t* codes) {
  if constexpr (R > 2) {
    _mm_prefetch(codes + kPrefetchBytes, _MM_HINT_T0);
    _mm_prefetch(codes + kPrefetchBytes + 64, _MM_HINT_T0);
  }
}

// Block scales / 256: e4m3 bits, moved to where half precision has them, stand for a
// number 2^8 smaller, as the exponent's bias is 15 instead of 7.
__m512 load_scales(const uint8_t* scales) {
  const __m128i e4m3 = _mm_load_si128(reinterpret_cast<const __m128i*>(scales));
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(e4m3), 7));
}

struct W4A4 : Zmm {
  static constexpr int kRows = 9;

  template <int R>
  static void segment(Sum (&sums)[R], const uint8_t* tile, int64_t begin, int64_t end,
                      const uint8_t* input, const LinearJob& job) {
    // Code -> 2 * e2m1 + 12. A permutation of bytes looks at 6 bits of an index; as the
    // table repeats, the upper two need not be cleared.
    const __m512i table = _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    for (int64_t b = begin; b < end; ++b) {
      const uint8_t* codes = tile + codes_offset(b);
      prefetch<R>(codes);
      const __m512i line0 = _mm512_load_si512(codes);
      const __m512i line1 = _mm512_load_si512(codes + 64);
      const __m512i weights[4] = {
          _mm512_permutexvar_epi8(line0, table),
          _mm512_permutexvar_epi8(_mm512_srli_epi16(line0, 4), table),
          _mm512_permutexvar_epi8(line1, table),
          _mm512_permutexvar_epi8(_mm512_srli_epi16(line1, 4), table),
      };
      const __m512 scales = load_scales(tile + scales_offset(b));
      const uint8_t* blocks = input + b * static_cast<int64_t>(sizeof(QuantizedBlock));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const auto* x = reinterpret_cast<const QuantizedBlock*>(blocks + r * job.input_stride);
        __m512i dot = _mm512_set1_epi32(x->offset);
#pragma GCC unroll 4
        for (int quad = 0; quad < 4; ++quad) {
          dot = _mm512_dpbusd_epi32(dot, weights[quad], broadcast32(x->values + 4 * quad));
        }
        const __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(x->scale));
        sums[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, sums[r]);
      }
    }
  }
};

struct W4A16 : Zmm {
  static constexpr int kRows = 12;

  template <int R>
  static void segment(Sum (&sums)[R], const uint8_t* tile, int64_t begin, int64_t end,
                      const uint8_t* input, const LinearJob& job) {
    // Code -> 2 * e2m1 in bf16; twice, as a permutation of words looks at 5 bits.
    const __m256i values =
        _mm256_setr_epi16(0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40c0, 0x4100, 0x4140, 0, -0x4080,
                          -0x4000, -0x3fc0, -0x3f80, -0x3f40, -0x3f00, -0x3ec0);
    const __m512i table = _mm512_broadcast_i64x4(values);
    for (int64_t b = begin; b < end; ++b) {
      const uint8_t* codes = tile + codes_offset(b);
      prefetch<R>(codes);
      __m512i weights[8];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m512i line = _mm512_load_si512(codes + 64 * i);
        weights[4 * i] = _mm512_permutexvar_epi16(line, table);
        weights[4 * i + 1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 8), table);
        weights[4 * i + 2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 4), table);
        weights[4 * i + 3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(line, 12), table);
      }
      const __m512 scales = load_scales(tile + scales_offset(b));
      const uint8_t* blocks = input + b * static_cast<int64_t>(sizeof(Bf16Block));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const auto* x = reinterpret_cast<const Bf16Block*>(blocks + r * job.input_stride);
        __m512 dot = _mm512_setzero_ps();
#pragma GCC unroll 8
        for (int pair = 0; pair < 8; ++pair) {
          dot = _mm512_dpbf16_ps(dot, reinterpret_cast<__m512bh>(broadcast32(x->values + 2 * pair)),
                                 reinterpret_cast<__m512bh>(weights[pair]));
        }
        sums[r] = _mm512_fmadd_ps(dot, scales, sums[r]);
      }
    }
  }
};

}  // namespace

const Kernels kAvx512Kernels = {run_linear<W4A4>, run_linear<W4A16>, quantize_row, round_row};

}  // namespace trtree::nvfp4
