// The body of every scan kernel, on vectors of the width this file is compiled for.
// Each including source is compiled for its own instruction set, so nothing here may
// have external linkage or call an inline library function: the linker could keep
// the copy that another processor cannot run.
#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "plugins/ddtree/row_scan.hpp"

namespace trtree::ddtree {
namespace {

// What the compiler's vector types do not express, or what it compiles badly.
// maximum() is b where either is NaN.
#if defined(__AVX512F__) && defined(__AVX512DQ__)
using Floats = __m512;
using Doubles = __m512d;
inline Floats maximum(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats fused_multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline __m256 low_half(Floats v) { return _mm512_castps512_ps256(v); }
inline __m256 high_half(Floats v) { return _mm512_extractf32x8_ps(v, 1); }
inline Doubles widen(__m256 half) { return _mm512_cvtps_pd(half); }
inline uint64_t at_least(Floats v, Floats threshold) {
  return _mm512_cmp_ps_mask(v, threshold, _CMP_GE_OQ);
}
inline __m128 fold(Floats v) {
  const __m256 w = _mm256_max_ps(low_half(v), high_half(v));
  return _mm_max_ps(_mm256_castps256_ps128(w), _mm256_extractf128_ps(w, 1));
}
#elif defined(__AVX2__) && defined(__FMA__)
using Floats = __m256;
using Doubles = __m256d;
inline Floats maximum(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats fused_multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline __m128 low_half(Floats v) { return _mm256_castps256_ps128(v); }
inline __m128 high_half(Floats v) { return _mm256_extractf128_ps(v, 1); }
inline Doubles widen(__m128 half) { return _mm256_cvtps_pd(half); }
inline uint64_t at_least(Floats v, Floats threshold) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(v, threshold, _CMP_GE_OQ)));
}
inline __m128 fold(Floats v) { return _mm_max_ps(low_half(v), high_half(v)); }
#else
typedef float Floats __attribute__((vector_size(16)));
typedef float HalfFloats __attribute__((vector_size(8)));
typedef double Doubles __attribute__((vector_size(16)));
inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
inline Floats fused_multiply_add(Floats a, Floats b, Floats c) {
  for (int i = 0; i < 4; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
inline HalfFloats low_half(Floats v) { return __builtin_shufflevector(v, v, 0, 1); }
inline HalfFloats high_half(Floats v) { return __builtin_shufflevector(v, v, 2, 3); }
inline Doubles widen(HalfFloats half) { return __builtin_convertvector(half, Doubles); }
inline uint64_t at_least(Floats v, Floats threshold) {
  uint64_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= uint64_t{v[i] >= threshold[i]} << i;
  return bits;
}
inline Floats fold(Floats v) { return v; }
#endif

constexpr int kLanes = sizeof(Floats) / sizeof(float);
constexpr int kAccumulators = 16;  // the same on every instruction set
constexpr int kVectors = kAccumulators / kLanes;
constexpr int kBlock = 32 * kChunk;  // 8 KiB: the second look hits the first-level cache
constexpr float kInfinity = __builtin_inff();
typedef int32_t Ints __attribute__((vector_size(sizeof(Floats))));

inline Floats broadcast(float value) { return value - Floats{}; }

inline Floats load(const float* from) {
  Floats v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

// exp(x) for x <= 0, below -87 as exp(-87); NaN stays NaN. x = (n + f) ln 2 with
// |f| <= 1/2, and 2^f is the polynomial of degree 6 with p(0) = 1 of least relative
// error (1.6e-8 with these coefficients): about 1 ulp in all.
inline Floats exp_nonpositive(Floats x) {
  const Floats log2_e = broadcast(0x1.715476p+0f);
  const Floats to_integer = broadcast(0x1.8p+23f);  // adding it leaves n in the low bits
  x = maximum(broadcast(-87.0f), x);
  const Floats shifted = fused_multiply_add(x, log2_e, to_integer);
  const Floats n = shifted - to_integer;
  const Floats f = fused_multiply_add(x, log2_e, -n);
  Floats p = broadcast(0x1.41fbbcp-13f);
  p = fused_multiply_add(p, f, broadcast(0x1.5f3e54p-10f));
  p = fused_multiply_add(p, f, broadcast(0x1.3b2d4cp-7f));
  p = fused_multiply_add(p, f, broadcast(0x1.c6aee8p-5f));
  p = fused_multiply_add(p, f, broadcast(0x1.ebfbdcp-3f));
  p = fused_multiply_add(p, f, broadcast(0x1.62e43p-1f));
  p = fused_multiply_add(p, f, broadcast(1.0f));
  const Ints power_of_two = ((Ints)shifted << 23) + (127 << 23);
  return p * (Floats)power_of_two;
}

// -inf where all are NaN.
inline float chunk_maximum(const float* chunk) {
  Floats best = broadcast(-kInfinity);
  for (int i = 0; i < kChunk; i += kLanes) best = maximum(load(chunk + i), best);
  const auto m = fold(best);
  const float left = m[0] > m[1] ? m[0] : m[1];
  const float right = m[2] > m[3] ? m[2] : m[3];
  return left > right ? left : right;
}

struct State {
  float max = -kInfinity;
  Doubles sums[2 * kVectors] = {};  // of exp(logit - max)

  void raise_max(float to) {
    const double scale = __builtin_exp(static_cast<double>(max) - to);
    for (Doubles& sum : sums) sum *= scale;
    max = to;
  }

  void add_block(const float* logits, int count, float* chunk_max) {
    float block_max = -kInfinity;
    for (int i = 0; i < count; i += kChunk) {
      const float m = chunk_maximum(logits + i);
      chunk_max[i / kChunk] = m;
      block_max = m > block_max ? m : block_max;
    }
    if (block_max > max) raise_max(block_max);
    const Floats shift = broadcast(max == -kInfinity ? 0.0f : max);
    for (int i = 0; i < count; i += kAccumulators) {
      for (int v = 0; v < kVectors; ++v) {
        const Floats e = exp_nonpositive(load(logits + i + v * kLanes) - shift);
        sums[2 * v] += widen(low_half(e));
        sums[2 * v + 1] += widen(high_half(e));
      }
    }
  }
};

inline RowScan scan_row(const float* logits, int32_t vocab, float* chunk_max) {
  State state;
  const int32_t whole = vocab - vocab % kChunk;
  for (int32_t at = 0; at < whole; at += kBlock) {
    const int32_t count = whole - at < kBlock ? whole - at : kBlock;
    state.add_block(logits + at, count, chunk_max + at / kChunk);
  }
  if (whole < vocab) {
    float rest[kChunk];
    for (float& logit : rest) logit = -kInfinity;
    __builtin_memcpy(rest, logits + whole, sizeof(float) * (vocab - whole));
    state.add_block(rest, kChunk, chunk_max + whole / kChunk);
  }
  double total = 0.0;
  for (const Doubles& sum : state.sums) {
    for (int i = 0; i < kLanes / 2; ++i) total += sum[i];
  }
  return {state.max, total};
}

inline uint64_t chunk_at_least(const float* chunk, float threshold) {
  uint64_t bits = 0;
  for (int i = 0; i < kChunk; i += kLanes) {
    bits |= at_least(load(chunk + i), broadcast(threshold)) << i;
  }
  return bits;
}

}  // namespace
}  // namespace trtree::ddtree
