#include "plugins/cpu_isa.hpp"

#include <array>
#include <stdexcept>

namespace trtree {
namespace {

constexpr std::array kAll = {Isa::kPortable, Isa::kAvx2, Isa::kAvx512};

bool supported(Isa isa) {
  switch (isa) {
    case Isa::kPortable:
      return true;
#ifdef TRTREE_X86_KERNELS
    case Isa::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
             __builtin_cpu_supports("f16c");
    case Isa::kAvx512:
      return supported(Isa::kAvx2) && __builtin_cpu_supports("avx512f") &&
             __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni") &&
             __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
#endif
    default:
      return false;
  }
}

}  // namespace

Isa best_isa() {
  static const Isa best = [] {
    Isa found = Isa::kPortable;
    for (Isa isa : kAll) {
      if (supported(isa)) found = isa;
    }
    return found;
  }();
  return best;
}

Isa isa_from_name(std::string_view name) {
  if (name.empty()) return best_isa();
  for (Isa isa : kAll) {
    if (isa_name(isa) != name) continue;
    if (!supported(isa)) {
      throw std::invalid_argument("isa \"" + std::string(name) +
                                  "\" is not supported here; the best is \"" +
                                  std::string(isa_name(best_isa())) + "\"");
    }
    return isa;
  }
  throw std::invalid_argument("isa \"" + std::string(name) +
                              "\" is unknown: expected portable, avx2 or avx512");
}

std::string_view isa_name(Isa isa) {
  switch (isa) {
    case Isa::kAvx2:
      return "avx2";
    case Isa::kAvx512:
      return "avx512";
    default:
      return "portable";
  }
}

}  // namespace trtree
