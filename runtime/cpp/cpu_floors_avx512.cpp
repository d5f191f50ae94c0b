#include <immintrin.h>

#include "runtime/cpp/cpu_floors.hpp"

namespace trtree::bench {
namespace {

// Makes the compiler forget what it knows of a register, at no cost.
template <typename T>
inline void forget(T& x) {
  asm volatile("" : "+v"(x));
}

struct Operands {
  __m512i a = _mm512_set1_epi32(0x01010101);
  __m512i b = _mm512_set1_epi32(0x02020202);
  __m512 scale = _mm512_set1_ps(0x1p-30f);
};

inline __m512 w4a4(Operands& x, __m512 sum) {
  forget(x.a);
  forget(x.scale);
  __m512i dot = x.b;
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) dot = _mm512_dpbusd_epi32(dot, x.a, x.b);
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(x.scale, x.scale), sum);
}

inline __m512 w4a16(Operands& x, __m512 sum) {
  forget(x.a);
  __m512 dot = x.scale;
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    dot = _mm512_dpbf16_ps(dot, reinterpret_cast<__m512bh>(x.a), reinterpret_cast<__m512bh>(x.b));
  }
  return _mm512_fmadd_ps(dot, x.scale, sum);
}

inline __m512 dense(Operands& x, __m512 sum) {
  const __m512 a = _mm512_castsi512_ps(x.a);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    forget(x.scale);
    sum = _mm512_fmadd_ps(a, x.scale, sum);
  }
  return sum;
}

// Eight blocks at a time, so that throughput counts and not latency.
template <__m512 (*Block)(Operands&, __m512)>
void repeat(int64_t blocks) {
  Operands operands;
  forget(operands.b);
  __m512 sums[8];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  for (int64_t i = 0; i < blocks; i += 8) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) sums[j] = Block(operands, sums[j]);
  }
  for (__m512& sum : sums) forget(sum);
}

}  // namespace

uint64_t read_avx512(const uint8_t* begin, const uint8_t* end) {
  __m512i sums[4] = {};
  for (; begin + sizeof(sums) <= end; begin += sizeof(sums)) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      sums[i] = _mm512_or_si512(sums[i], _mm512_loadu_si512(begin + 64 * i));
    }
  }
  uint64_t words[8];
  _mm512_storeu_si512(
      words, _mm512_or_si512(_mm512_or_si512(sums[0], sums[1]), _mm512_or_si512(sums[2], sums[3])));
  uint64_t all = 0;
  for (uint64_t word : words) all |= word;
  return all;
}

void run_blocks_avx512(BlockKind kind, int64_t blocks) {
  switch (kind) {
    case BlockKind::kW4A4:
      return repeat<w4a4>(blocks);
    case BlockKind::kW4A16:
      return repeat<w4a16>(blocks);
    case BlockKind::kDense:
      return repeat<dense>(blocks);
  }
}

}  // namespace trtree::bench
