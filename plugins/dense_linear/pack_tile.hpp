// A tile of packed weights from 16 rows, [16, K] -> [K, 16], in vectors of the instruction
// set's width. Internal linkage for the reason given in linear_tiles.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "plugins/dense_linear/kernels.hpp"
#include "plugins/stored_rows.hpp"
#include "plugins/transpose.hpp"

namespace trtree::dense {
namespace {

// 16 (AVX-512) or 8 elements of each row at `offset` bytes; `kExponent`: all ones in infinity
// and NaN, and then `faults` is no longer zero.
template <uint16_t kExponent>
inline void pack_step(const uint8_t* const* rows, int64_t offset, uint8_t* to,
                      Wide<uint16_t>& faults) {
  constexpr int kRows = kWideLanes == 1 ? 8 : 16;
#pragma GCC unroll 2
  for (int first = 0; first < kTileColumns; first += kRows) {
    Wide<uint16_t> x[8];
#pragma GCC unroll 8
    for (int r = 0; r < 8; ++r) {
      const uint8_t* from[kWideLanes];
      for (int i = 0; i < kWideLanes; ++i) {
        from[i] = rows[first + r + i % 2 * 8] + offset + i / 2 * 16;
      }
      x[r] = load_lanes<uint16_t>(from);
      faults |= (x[r] & kExponent) == kExponent;
    }
    transpose8(x);
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      constexpr int64_t kRowBytes = 2 * kTileColumns;
      uint8_t* const row = to + k * kRowBytes + first * 2;
      constexpr int64_t kPart = std::min<int64_t>(kWideBytes, kRowBytes);
      std::memcpy(row, &x[k], kPart);
      if constexpr (kWideBytes > kPart) {
        std::memcpy(row + 8 * kRowBytes, reinterpret_cast<const uint8_t*>(&x[k]) + kPart, kPart);
      }
    }
  }
}

// 4 elements of each row.
template <uint32_t kExponent>
inline void pack_step(const uint8_t* const* rows, int64_t offset, uint8_t* to,
                      Wide<uint32_t>& faults) {
  constexpr int kRows = 4 * kWideLanes;
#pragma GCC unroll 4
  for (int first = 0; first < kTileColumns; first += kRows) {
    Wide<uint32_t> x[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      x[r] = load_rows<uint32_t>(rows + first + r, 4, offset);
      faults |= (x[r] & kExponent) == kExponent;
    }
    transpose4(x);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) store_wide(to + (k * kTileColumns + first) * 4, x[k]);
  }
}

// Whether all of the tile's numbers are finite.
template <typename T, T kExponent>
bool pack_tile(const TileRows& rows, int64_t in_features, uint8_t* tile) {
  constexpr int64_t kStep = sizeof(T) == 4 ? 4 : std::max(8, 8 * kWideLanes / 2);
  constexpr int64_t kStepBytes = kStep * kTileColumns * sizeof(T);
  Wide<T> faults = {};
  int64_t k = 0;
  for (; k + kStep <= in_features; k += kStep) {
    pack_step<kExponent>(rows, k * sizeof(T), tile + k * kTileColumns * sizeof(T), faults);
  }
  if (k < in_features) {
    T last[kTileColumns][kStep] = {};
    uint8_t packed[kStepBytes];
    TileRows last_rows;
    const int64_t left = in_features - k;
    for (int64_t c = 0; c < kTileColumns; ++c) {
      std::memcpy(last[c], rows[c] + k * sizeof(T), left * sizeof(T));
      last_rows[c] = reinterpret_cast<const uint8_t*>(last[c]);
    }
    pack_step<kExponent>(last_rows, 0, packed, faults);
    std::memcpy(tile + k * kTileColumns * sizeof(T), packed, left * kTileColumns * sizeof(T));
  }
  const auto any = __builtin_bit_cast(Wide<uint64_t>, faults);
  uint64_t bits = 0;
  for (int i = 0; i < kWideBytes / 8; ++i) bits |= any[i];
  return bits == 0;
}

constexpr PackKernels kPackKernels = {
    pack_tile<uint16_t, 0x7f80>,      // bf16
    pack_tile<uint16_t, 0x7c00>,      // fp16
    pack_tile<uint32_t, 0x7f800000>,  // float32
};

}  // namespace
}  // namespace trtree::dense
