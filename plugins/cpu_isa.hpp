// Which instruction set a CPU kernel runs on, chosen at run time.
#pragma once

#include <string>
#include <string_view>

namespace trtree {

// kAvx2: AVX2, FMA and F16C. kAvx512: F, BW, DQ, VL, VNNI, VBMI and BF16 (Zen 4,
// Sapphire Rapids and later).
enum class Isa { kPortable, kAvx2, kAvx512 };

// The best one that this build and this CPU have.
Isa best_isa();

// "portable", "avx2", "avx512", or "" for the best. Throws std::invalid_argument if
// the name is unknown or the CPU or this build lacks it.
Isa isa_from_name(std::string_view name);

std::string_view isa_name(Isa isa);

}  // namespace trtree
