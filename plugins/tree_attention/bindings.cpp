// trtree._core.tree_attention: how the CPU kernels keep numbers in a cache, for tests.
#include <stdexcept>
#include <string>

#include "plugins/linear_bindings.hpp"
#include "plugins/tree_attention/cpu.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

namespace {

using bindings::InputArray;
using bindings::OutputArray;

constexpr auto kE4m3 = attention::KvType::kE4m3;

void check_size(size_t n) {
  if (n % kBlock != 0) {
    throw std::invalid_argument(std::to_string(n) + " numbers are no multiple of " +
                                std::to_string(kBlock));
  }
}

OutputArray<uint8_t> encode(const InputArray<float, 1>& x, float scale, const std::string& isa) {
  check_size(x.size());
  auto codes = bindings::new_array<uint8_t>({x.size()});
  attention::to_kv(kE4m3, x.data(), static_cast<int64_t>(x.size()), scale,
                   reinterpret_cast<std::byte*>(codes.data()), isa_from_name(isa));
  return codes;
}

OutputArray<float> decode(const InputArray<uint8_t, 1>& codes, float scale,
                          const std::string& isa) {
  check_size(codes.size());
  auto x = bindings::new_array<float>({codes.size()});
  attention::from_kv(kE4m3, reinterpret_cast<const std::byte*>(codes.data()),
                     static_cast<int64_t>(codes.size()), scale, x.data(), isa_from_name(isa));
  return x;
}

}  // namespace

void bind_tree_attention(nb::module_& m) {
  nb::module_ sub = m.def_submodule("tree_attention", "E4M3 as a KV cache keeps it.");
  sub.def("encode", &encode, "x"_a, "scale"_a, "isa"_a = "",
          "float32 [n] -> uint8 [n]: the codes of x / scale; n is a multiple of 16.");
  sub.def("decode", &decode, "codes"_a, "scale"_a, "isa"_a = "",
          "uint8 [n] -> float32 [n]: code * scale; n is a multiple of 16.");
}

}  // namespace trtree
