// trtree._core.linear_bench, for runtime/bench/linear.py.
#include "plugins/linear_bindings.hpp"
#include "runtime/cpp/cpu_floors.hpp"
#include "runtime/cpp/linear_bench.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

namespace {

using Bytes = bindings::InputArray<uint8_t, 1>;

// `linears`: (packed bytes, O, K, whether it reads the input of the one before).
double time_step(const std::vector<std::tuple<Bytes, int64_t, int64_t, bool>>& linears,
                 int64_t rows, bool bf16, Parallel& parallel, const std::string& isa) {
  std::vector<bench::StepLinear> step;
  for (const auto& [packed, out_features, in_features, same_input] : linears) {
    step.push_back({.weight = {.packed = bindings::span(packed),
                               .out_features = out_features,
                               .in_features = in_features,
                               .global_scale = 1.0f,
                               .segments = Segments::even(in_features / kBlock)},
                    .same_input = same_input});
  }
  nb::gil_scoped_release release;
  return bench::time_step(step, rows, bf16, parallel, isa_from_name(isa));
}

double time_dense(const Bytes& packed, const std::string& dtype, int64_t out_features,
                  int64_t in_features, int64_t rows, Parallel& parallel, const std::string& isa) {
  const dense::Weight weight = {.packed = bindings::span(packed),
                                .out_features = out_features,
                                .in_features = in_features,
                                .dtype = dense::dtype_from_name(dtype),
                                .segments = bindings::segments(std::nullopt, in_features)};
  nb::gil_scoped_release release;
  return bench::time_dense(weight, rows, parallel, isa_from_name(isa));
}

}  // namespace

void bind_linear_bench(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("linear_bench", "See runtime/bench/linear.py.");
  nb::enum_<bench::BlockKind>(m, "BlockKind")
      .value("W4A4", bench::BlockKind::kW4A4)
      .value("W4A16", bench::BlockKind::kW4A16)
      .value("DENSE", bench::BlockKind::kDense);
  m.def("time_step", &time_step, "linears"_a, "rows"_a, "bf16"_a, "parallel"_a, "isa"_a);
  m.def("time_dense", &time_dense, "packed"_a, "dtype"_a, "out_features"_a, "in_features"_a,
        "rows"_a, "parallel"_a, "isa"_a);
  m.def(
      "time_read",
      [](const Bytes& bytes, Parallel& parallel) {
        return bench::time_read(bindings::span(bytes), parallel);
      },
      "bytes"_a, "parallel"_a);
  m.def("time_blocks", &bench::time_blocks, "kind"_a, "blocks"_a, "parallel"_a);
}

}  // namespace trtree
