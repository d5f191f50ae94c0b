// Matrices as checkpoints store them, to be packed in tiles of 16 rows.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "plugins/linear_job.hpp"

namespace trtree {

// Rows of a matrix, `stride` bytes from one to the next.
struct StoredRows {
  const uint8_t* data;
  int64_t rows;
  int64_t stride;
};

using TileRows = const uint8_t* [kTileColumns];

int64_t count_rows(std::span<const StoredRows> parts);

// Returns the rows of all parts. Throws std::invalid_argument, naming the linear's kind and
// shape, unless `first` to `end` are some of them, of which only the last may end inside a
// tile, and the packed bytes are as many as expected.
int64_t check_tiles(std::string_view kind, std::span<const StoredRows> parts, int64_t in_features,
                    int64_t first, int64_t end, size_t packed, int64_t expected);

// Rows `first` to `first` + 16 of matrices that follow one another; those past the end are
// `zeros`.
inline void tile_rows(std::span<const StoredRows> parts, int64_t first, const uint8_t* zeros,
                      TileRows& rows) {
  int64_t found = 0;
  for (const StoredRows& part : parts) {
    for (; found < kTileColumns && first < part.rows; ++first) {
      rows[found++] = part.data + first * part.stride;
    }
    first -= part.rows;
  }
  while (found < kTileColumns) rows[found++] = zeros;
}

}  // namespace trtree
