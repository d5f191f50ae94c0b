// Transposing rows in vectors of as many bytes as a translation unit's instruction set has.
// Internal linkage, for the reason given in linear_tiles.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

namespace trtree {
namespace {

#if defined(__AVX512BW__)
constexpr int kWideBytes = 64;
#elif defined(__AVX2__)
constexpr int kWideBytes = 32;
#else
constexpr int kWideBytes = 16;
#endif
constexpr int kWideLanes = kWideBytes / 16;  // of 16 bytes, each of which comes from one row

template <typename T, int kBytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kBytes)));
};
template <typename T>
using Wide = typename VectorOf<T, kWideBytes>::Type;
template <typename T>
using Lane = typename VectorOf<T, 16>::Type;

template <typename T>
inline Lane<T> load_lane(const uint8_t* from) {
  Lane<T> lane;
  std::memcpy(&lane, from, sizeof(lane));
  return lane;
}

// A lane from each of these addresses.
template <typename T>
inline Wide<T> load_lanes(const uint8_t* const (&from)[kWideLanes]) {
#if defined(__AVX512BW__)
  const auto low = __builtin_shufflevector(load_lane<uint64_t>(from[0]),
                                           load_lane<uint64_t>(from[1]), 0, 1, 2, 3);
  const auto high = __builtin_shufflevector(load_lane<uint64_t>(from[2]),
                                            load_lane<uint64_t>(from[3]), 0, 1, 2, 3);
  return __builtin_bit_cast(Wide<T>, __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7));
#elif defined(__AVX2__)
  return __builtin_bit_cast(
      Wide<T>, __builtin_shufflevector(load_lane<uint64_t>(from[0]), load_lane<uint64_t>(from[1]),
                                       0, 1, 2, 3));
#else
  return load_lane<T>(from[0]);
#endif
}

// 16 bytes at `offset` of rows 0, `step`, 2 * `step`, ...
template <typename T>
inline Wide<T> load_rows(const uint8_t* const* rows, int step, int64_t offset) {
  const uint8_t* from[kWideLanes];
  for (int i = 0; i < kWideLanes; ++i) from[i] = rows[i * step] + offset;
  return load_lanes<T>(from);
}

template <typename V>
inline void store_wide(uint8_t* to, const V& value) {
  std::memcpy(to, &value, sizeof(value));
}

// In each lane of n elements, the first (half = 0) or second halves of a and b in turn.
template <int half, typename V, size_t... I>
inline V zip(V a, V b, std::index_sequence<I...>) {
  constexpr int kCount = sizeof...(I);
  constexpr int n = kCount / (sizeof(V) / 16);
  return __builtin_shufflevector(
      a, b, static_cast<int>(I / n * n + half * n / 2 + I % n / 2 + I % 2 * kCount)...);
}

template <int half, typename V>
inline V zip(V a, V b) {
  return zip<half>(a, b, std::make_index_sequence<sizeof(V) / sizeof(a[0])>());
}

// In every lane: element j of vector i -> element i of vector j, of 4 vectors of 32 bits.
template <typename V>
inline void transpose4(V (&x)[4]) {
  const V low02 = zip<0>(x[0], x[2]), low13 = zip<0>(x[1], x[3]);
  const V high02 = zip<1>(x[0], x[2]), high13 = zip<1>(x[1], x[3]);
  x[0] = zip<0>(low02, low13);
  x[1] = zip<1>(low02, low13);
  x[2] = zip<0>(high02, high13);
  x[3] = zip<1>(high02, high13);
}

// The same of 8 vectors of 16 bits.
template <typename V>
inline void transpose8(V (&x)[8]) {
  V even[4], odd[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // i and i + 4: of each lane's elements, 0 to 3 and 4 to 7
    even[i] = zip<0>(x[i], x[i + 4]);
    odd[i] = zip<1>(x[i], x[i + 4]);
  }
  const auto four = [](const V(&y)[4], V* out) {
    const V low02 = zip<0>(y[0], y[2]), low13 = zip<0>(y[1], y[3]);
    const V high02 = zip<1>(y[0], y[2]), high13 = zip<1>(y[1], y[3]);
    out[0] = zip<0>(low02, low13);
    out[1] = zip<1>(low02, low13);
    out[2] = zip<0>(high02, high13);
    out[3] = zip<1>(high02, high13);
  };
  four(even, x);
  four(odd, x + 4);
}

}  // namespace
}  // namespace trtree
