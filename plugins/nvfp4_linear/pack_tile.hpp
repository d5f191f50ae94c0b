// A tile of packed weights from 16 rows of codes and block scales: plain transposition, in
// vectors of the instruction set's width. Internal linkage for the reason given in
// linear_tiles.hpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "plugins/nvfp4_linear/layout.hpp"
#include "plugins/stored_rows.hpp"
#include "plugins/transpose.hpp"

namespace trtree::nvfp4 {
namespace {

constexpr int64_t kGroupCodes = kGroupBlocks * kBlock / 2;  // bytes of a row in a group

// The nibbles of each 32 bits, from 01234567 to 04152637.
template <typename V>
inline V spread_nibbles(V x) {
  V swap = (x ^ (x >> 8)) & 0x0000ff00u;
  x ^= swap ^ (swap << 8);
  swap = (x ^ (x >> 4)) & 0x00f000f0u;
  return x ^ swap ^ (swap << 4);
}

// A group's codes, 32 bytes at `offset` of each row.
inline void pack_codes(const uint8_t* const* rows, int64_t offset, uint8_t* to) {
  constexpr int kRows = 4 * kWideLanes;  // that one vector of each place takes
#pragma GCC unroll 4
  for (int first = 0; first < kTileColumns; first += kRows) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Wide<uint32_t> lines[4];
#pragma GCC unroll 4
      for (int r = 0; r < 4; ++r) {
        lines[r] = load_rows<uint32_t>(rows + first + r, 4, offset + 16 * half);
      }
      transpose4(lines);
#pragma GCC unroll 4
      for (int line = 0; line < 4; ++line) {
        store_wide(to + (4 * half + line) * 64 + first * 4, spread_nibbles(lines[line]));
      }
    }
  }
}

// A group's block scales, 4 bytes at `offset` of each row, without the sign of -0. Adds to
// `faults` what is negative or NaN.
inline void pack_scales(const uint8_t* const* rows, int64_t offset, uint8_t* to,
                        Lane<int8_t>& faults) {
  Lane<uint32_t> columns[4];  // of each, a dword is 4 columns of one block
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad) {
    uint32_t row[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) std::memcpy(&row[r], rows[4 * quad + r] + offset, 4);
    const Lane<uint32_t> even = {row[0], row[2], 0, 0}, odd = {row[1], row[3], 0, 0};
    // Bytes of rows 0 1 0 1 ..., then 2 3 2 3 ...
    const auto pairs = __builtin_bit_cast(
        Lane<uint16_t>,
        zip<0>(__builtin_bit_cast(Lane<uint8_t>, even), __builtin_bit_cast(Lane<uint8_t>, odd)));
    const auto others = __builtin_shufflevector(pairs, pairs, 4, 5, 6, 7, 0, 1, 2, 3);
    const auto bytes = __builtin_bit_cast(Lane<int8_t>, zip<0>(pairs, others));
    faults |= (bytes == int8_t{127}) | ((bytes < 0) & (bytes != int8_t{-128}));
    columns[quad] = __builtin_bit_cast(Lane<uint32_t>, bytes) & 0x7f7f7f7fu;
  }
  transpose4(columns);
#pragma GCC unroll 4
  for (int block = 0; block < 4; ++block) {
    store_wide(to + block * kBlockScales, columns[block]);
  }
}

// Whether all block scales were good. The last group may have fewer than 4 blocks.
[[maybe_unused]] bool pack_tile(const TileRows& codes, const TileRows& scales, int64_t blocks,
                                uint8_t* tile) {
  Lane<int8_t> faults = {};
  int64_t block = 0;
  for (; block + kGroupBlocks <= blocks; block += kGroupBlocks) {
    pack_scales(scales, block, tile, faults);
    pack_codes(codes, block * kBlock / 2, tile + kGroupBlocks * kBlockScales);
    tile += kGroupBytes;
  }
  if (block < blocks) {
    uint8_t last[kTileColumns][kGroupCodes + kGroupBlocks] = {};
    TileRows last_codes, last_scales;
    for (int64_t c = 0; c < kTileColumns; ++c) {
      last_codes[c] = last[c];
      last_scales[c] = last[c] + kGroupCodes;
      std::memcpy(last[c], codes[c] + block * kBlock / 2, (blocks - block) * kBlock / 2);
      std::memcpy(last[c] + kGroupCodes, scales[c] + block, blocks - block);
    }
    pack_scales(last_scales, 0, tile, faults);
    pack_codes(last_codes, 0, tile + kGroupBlocks * kBlockScales);
  }
  const auto any = __builtin_bit_cast(Lane<uint64_t>, faults);
  return (any[0] | any[1]) == 0;
}

}  // namespace
}  // namespace trtree::nvfp4
