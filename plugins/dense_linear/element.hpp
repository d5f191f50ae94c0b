// Weight elements in plain C++, for the portable kernel and for reading rows.
#pragma once

#include <cstdint>
#include <cstring>

namespace trtree::dense {
namespace {

struct Bf16 {
  using Storage = uint16_t;
  static float load(Storage x) { return __builtin_bit_cast(float, static_cast<uint32_t>(x) << 16); }
};

struct Fp16 {
  using Storage = uint16_t;
  static float load(Storage x) {
    const uint32_t sign = (x & 0x8000u) << 16;
    const uint32_t magnitude = x & 0x7fffu;
    if (magnitude >= 0x7c00u) {  // infinity or NaN
      return __builtin_bit_cast(float, sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    }
    // Moved into place the exponent is 112 too small; subnormals come out right as well.
    const float value = __builtin_bit_cast(float, magnitude << 13) * 0x1p112f;
    return __builtin_bit_cast(float, sign | __builtin_bit_cast(uint32_t, value));
  }
};

struct Float32 {
  using Storage = float;
  static float load(Storage x) { return x; }
};

}  // namespace
}  // namespace trtree::dense
