// The body of every kernel, on vectors of the width this file is compiled for. Each
// including source is compiled for its own instruction set, so nothing here may have
// external linkage or call an inline library function: the linker could keep the copy
// that another processor cannot run.
#include <stdint.h>

#include "runtime/cpp/exp_weights.hpp"

namespace trtree {
namespace {

#if defined(__AVX512F__) && defined(__AVX512DQ__)
constexpr int kLanes = 8;
#elif defined(__AVX2__)
constexpr int kLanes = 4;
#else
constexpr int kLanes = 2;
#endif
typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef uint64_t Longs __attribute__((vector_size(8 * kLanes)));
typedef float Floats __attribute__((vector_size(4 * kLanes)));

constexpr int kAccumulators = 8;  // the same on every instruction set
constexpr int kVectors = kAccumulators / kLanes;

inline Doubles broadcast(double value) { return value - Doubles{}; }

inline Doubles load(const float* from) {
  Floats narrow;
  __builtin_memcpy(&narrow, from, sizeof narrow);
  return __builtin_convertvector(narrow, Doubles);
}

// exp(x) for x <= 0, 0 below -708. x = n ln 2 + f with |f| <= ln 2 / 2, ln 2 in two parts
// of which the first times n is exact, and exp(f) is its Taylor series up to f^13 / 13!,
// the next term of which is below 2^-57: within 2 ulp.
inline Doubles exp_nonpositive(Doubles x) {
  const Doubles to_integer = broadcast(0x1.8p+52);  // adding it leaves n in the low bits
  const Doubles shifted = x * 0x1.71547652b82fep+0 + to_integer;
  const Doubles n = shifted - to_integer;
  const Doubles f = (x - n * 0x1.62e42fefa38p-1) - n * 0x1.ef35793c7673p-45;
  Doubles p = broadcast(1.0 / 6227020800.0);
  p = p * f + 1.0 / 479001600.0;
  p = p * f + 1.0 / 39916800.0;
  p = p * f + 1.0 / 3628800.0;
  p = p * f + 1.0 / 362880.0;
  p = p * f + 1.0 / 40320.0;
  p = p * f + 1.0 / 5040.0;
  p = p * f + 1.0 / 720.0;
  p = p * f + 1.0 / 120.0;
  p = p * f + 1.0 / 24.0;
  p = p * f + 1.0 / 6.0;
  p = p * f + 0.5;
  p = p * f + 1.0;
  p = p * f + 1.0;
  const Longs power_of_two = ((Longs)shifted << 52) + (uint64_t{1023} << 52);
  const Doubles result = p * (Doubles)power_of_two;
  return (Doubles)((Longs)result & (Longs)(x >= -708.0));
}

inline void chunk_weights(const float* logits, double max, double scale, double* weights) {
  for (int i = 0; i < kWeightChunk; i += kLanes) {
    const Doubles w = exp_nonpositive((load(logits + i) - max) * scale);
    __builtin_memcpy(weights + i, &w, sizeof w);
  }
}

inline double chunk_sum(const float* logits, double max, double scale) {
  Doubles sums[kVectors] = {};
  for (int i = 0; i < kWeightChunk; i += kAccumulators) {
    for (int v = 0; v < kVectors; ++v) {
      sums[v] += exp_nonpositive((load(logits + i + v * kLanes) - max) * scale);
    }
  }
  double total = 0.0;
  for (const Doubles& sum : sums) {
    for (int i = 0; i < kLanes; ++i) total += sum[i];
  }
  return total;
}

// The last chunk, filled up with what weighs nothing.
struct Rest {
  float logits[kWeightChunk];

  Rest(const float* from, int32_t count) {
    for (float& logit : logits) logit = -__builtin_inff();
    __builtin_memcpy(logits, from, sizeof(float) * count);
  }
};

inline void row_weights(const float* logits, int32_t count, double max, double scale,
                        double* weights) {
  const int32_t whole = count - count % kWeightChunk;
  for (int32_t i = 0; i < whole; i += kWeightChunk) {
    chunk_weights(logits + i, max, scale, weights + i);
  }
  if (whole == count) return;
  double last[kWeightChunk];
  chunk_weights(Rest(logits + whole, count - whole).logits, max, scale, last);
  __builtin_memcpy(weights + whole, last, sizeof(double) * (count - whole));
}

inline void row_sums(const float* logits, int32_t count, double max, double scale, double* sums) {
  const int32_t whole = count - count % kWeightChunk;
  for (int32_t i = 0; i < whole; i += kWeightChunk) *sums++ = chunk_sum(logits + i, max, scale);
  if (whole < count) *sums = chunk_sum(Rest(logits + whole, count - whole).logits, max, scale);
}

}  // namespace
}  // namespace trtree
