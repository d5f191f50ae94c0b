// 16 float32 columns in plain C++, for linear_tiles.hpp.
#pragma once

#include <cstdint>

#include "plugins/linear_job.hpp"

namespace trtree {
namespace {

struct Plain {
  struct Sum {
    float column[kTileColumns];
  };
  static Sum zero() { return {}; }
  static Sum add(Sum a, const Sum& b) {
    for (int c = 0; c < kTileColumns; ++c) a.column[c] += b.column[c];
    return a;
  }
  static Sum finish(Sum sum, float scale, const float* bias, int64_t n) {
    for (int64_t c = 0; c < n; ++c) {
      sum.column[c] *= scale;
      if (bias != nullptr) sum.column[c] += bias[c];
    }
    return sum;
  }
  static void store(const Sum& sum, float* out, int64_t n) {
    for (int64_t c = 0; c < n; ++c) out[c] = sum.column[c];
  }
};

}  // namespace
}  // namespace trtree
