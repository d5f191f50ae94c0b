#include <immintrin.h>

#include "plugins/linear_tiles.hpp"
#include "plugins/nvfp4_linear/kernels.hpp"
#include "plugins/nvfp4_linear/pack_tile.hpp"
#include "plugins/nvfp4_linear/prepare_row.hpp"
#include "plugins/nvfp4_linear/quantize_row.hpp"
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

// prepare_row.hpp's arithmetic, 16 blocks at a time; what is written here are the steps that the
// compiler does not find: maxima and sums of blocks without a chain for each.

// prepare_row.hpp's round_to.
__m512 round_to(__m512 x, uint32_t mantissa_bits, int min_exponent) {
  const __m512i lowest = _mm512_set1_epi32((127 + min_exponent) << 23);
  __m512i exponent = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(kExponent));
  exponent = _mm512_max_epi32(exponent, lowest);
  const __m512i up = _mm512_set1_epi32(static_cast<int32_t>((23 - mantissa_bits) << 23));
  const __m512 shifter = _mm512_castsi512_ps(
      _mm512_or_si512(_mm512_add_epi32(exponent, up), _mm512_set1_epi32(0x400000)));
  return _mm512_sub_ps(_mm512_add_ps(x, shifter), shifter);
}

// Folds 16 vectors to one: lane i is that of vector i, over all its lanes.
template <typename Fold>
__m512i fold16(__m512i (&v)[16], const Fold& fold) {
  const auto quarter = [&](__m512i a, __m512i b, __m512i c, __m512i d) {
    const auto halves = [&](__m512i x, __m512i y) {
      return fold(_mm512_shuffle_i32x4(x, y, 0x44), _mm512_shuffle_i32x4(x, y, 0xee));
    };
    const __m512i ab = halves(a, b), cd = halves(c, d);
    return fold(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xdd));
  };
  // Of q[k], the 128-bit lane j has 4 lanes of v[k + 4 * j]; unpacking puts k side by side.
  __m512i q[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) q[k] = quarter(v[k], v[k + 4], v[k + 8], v[k + 12]);
  const __m512i even = fold(_mm512_unpacklo_epi32(q[0], q[2]), _mm512_unpackhi_epi32(q[0], q[2]));
  const __m512i odd = fold(_mm512_unpacklo_epi32(q[1], q[3]), _mm512_unpackhi_epi32(q[1], q[3]));
  return fold(_mm512_unpacklo_epi32(even, odd), _mm512_unpackhi_epi32(even, odd));
}

// `count` blocks, at most 16.
void quantize_blocks(const float* x, int64_t count, float input_scale, QuantizedBlock* blocks) {
  const __m512i magnitudes = _mm512_set1_epi32(kMagnitude);
  __m512i parts[16];
#pragma GCC unroll 16
  for (int b = 0; b < 16; ++b) {
    const float* const from = x + (b < count ? b : 0) * kBlock;
    parts[b] = _mm512_and_si512(_mm512_loadu_si512(from), magnitudes);
  }
  const auto larger = [](__m512i a, __m512i b) { return _mm512_max_epi32(a, b); };
  const __m512 largest = _mm512_castsi512_ps(fold16(parts, larger));
  // The scale, NaN as it is.
  const __m512 wanted = _mm512_div_ps(largest, _mm512_set1_ps(6.0f * input_scale));
  const __m512 scale = round_to(_mm512_min_ps(_mm512_set1_ps(448.0f), wanted), 3, -6);
  float scales[16];
  _mm512_storeu_ps(scales, scale);
  for (int64_t b = 0; b < count; ++b) {
    QuantizedBlock& out = blocks[b];
    out.scale = 256.0f * scales[b];
    const float step = scales[b] * input_scale;
    const bool zero = !(step > 0.0f);
    const __m512 ratio =
        _mm512_div_ps(_mm512_loadu_ps(x + b * kBlock), _mm512_set1_ps(zero ? 1.0f : step));
    const __mmask16 keep = zero ? 0 : 0xffff;
    const __m512i value = _mm512_maskz_mov_epi32(keep, _mm512_castps_si512(ratio));
    const __m512i six = _mm512_castps_si512(_mm512_set1_ps(6.0f));
    const __m512i magnitude = _mm512_min_epi32(_mm512_and_si512(value, magnitudes), six);
    const __m512 rounded = round_to(_mm512_castsi512_ps(magnitude), 1, 0);
    const __m512i doubled = _mm512_cvttps_epi32(_mm512_add_ps(rounded, rounded));
    const __mmask16 negative = _mm512_movepi32_mask(value);
    const __m512i codes = _mm512_mask_sub_epi32(doubled, negative, _mm512_setzero_si512(), doubled);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out.values), _mm512_cvtepi32_epi8(codes));
    parts[b] = codes;
  }
  alignas(64) int32_t sums[16];
  const auto add = [](__m512i a, __m512i b) { return _mm512_add_epi32(a, b); };
  _mm512_store_si512(sums, fold16(parts, add));
  for (int64_t b = 0; b < count; ++b) blocks[b].offset = -12 * sums[b];
}

void quantize_row_avx512(const float* x, int64_t k, float input_scale, QuantizedBlock* blocks) {
  for (int64_t b = 0; b < k / kBlock; b += 16) {
    const int64_t left = k / kBlock - b;
    quantize_blocks(x + b * kBlock, left < 16 ? left : 16, input_scale, blocks + b);
  }
}

}  // namespace

const Kernels kAvx512Kernels = {run_linear<W4A4>, run_linear<W4A16>, quantize_row_avx512,
                                round_row,        pack_tile,         kQuantizeKernels};

}  // namespace trtree::nvfp4
