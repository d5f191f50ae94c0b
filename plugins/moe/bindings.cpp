// trtree._core.moe: what plugins/moe/cpu.py checks and documents.
#include "plugins/linear_bindings.hpp"
#include "plugins/moe/moe.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

namespace {

using bindings::InputArray;
using bindings::OutputArray;
using SlotArray = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;

OutputArray<float> route(const InputArray<float, 2>& logits,
                         const std::optional<InputArray<float, 1>>& bias, int64_t top_k,
                         bool sigmoid, bool normalize, double scale, int64_t groups,
                         int64_t top_groups, Parallel& parallel) {
  const size_t rows = logits.shape(0), experts = logits.shape(1);
  const auto n = static_cast<int64_t>(experts);
  const moe::Routing routing = {n, top_k, sigmoid, normalize, scale, groups, top_groups};
  auto weights = bindings::new_array<float>({rows, experts});
  moe::route(routing, {logits.data(), n}, static_cast<int64_t>(rows), bindings::bias_of(bias, n),
             weights.data(), n, parallel);
  return weights;
}

moe::Experts nvfp4_experts(const InputArray<uint8_t, 1>& packed, int64_t out_features,
                           int64_t in_features, const InputArray<float, 1>& global_scales,
                           std::optional<float> input_scale,
                           const std::optional<std::vector<int64_t>>& bounds) {
  const nvfp4::Weight first = {.packed = {},
                               .out_features = out_features,
                               .in_features = in_features,
                               .segments = bindings::segments(bounds, in_features)};
  return moe::stack(first, bindings::span(packed), bindings::span(global_scales), input_scale);
}

moe::Experts dense_experts(const InputArray<uint8_t, 1>& packed, const std::string& dtype,
                           int64_t count, int64_t out_features, int64_t in_features,
                           const std::optional<std::vector<int64_t>>& bounds) {
  const dense::Weight first = {.packed = {},
                               .out_features = out_features,
                               .in_features = in_features,
                               .dtype = dense::dtype_from_name(dtype),
                               .segments = bindings::segments(bounds, in_features)};
  return moe::stack(first, bindings::span(packed), count);
}

void check_shape(const char* what, int64_t is, int64_t expected) {
  if (is == expected) return;
  throw std::invalid_argument(std::string(what) + " is " + std::to_string(is) + ", expected " +
                              std::to_string(expected));
}

// x [rows, K], or [rows, slots, K].
moe::SlotRows slot_rows(const SlotArray& x, int64_t k, int64_t slots) {
  check_shape("K", static_cast<int64_t>(x.shape(x.ndim() - 1)), k);
  if (x.ndim() == 2) return {{x.data(), k}};
  check_shape("axes of x", static_cast<int64_t>(x.ndim()), 3);
  check_shape("slots", static_cast<int64_t>(x.shape(1)), slots);
  return {{x.data(), k}, true};
}

OutputArray<float> scale(const SlotArray& x, const InputArray<float, 2>& weights,
                         const InputArray<float, 2>& vectors, int64_t slots, Parallel& parallel) {
  const size_t rows = weights.shape(0), k = vectors.shape(1);
  const auto count = static_cast<int64_t>(rows), experts = static_cast<int64_t>(weights.shape(1));
  const auto features = static_cast<int64_t>(k);
  const moe::SlotRows from = slot_rows(x, features, slots);
  check_shape("rows of x", static_cast<int64_t>(x.shape(0)), count);
  check_shape("vectors", static_cast<int64_t>(vectors.shape(0)), experts);
  auto y = bindings::new_array<float>({rows, static_cast<size_t>(slots), k});
  nb::gil_scoped_release release;
  moe::scale(from, {weights.data(), experts}, count, experts, slots, vectors.data(), features,
             y.data(), parallel);
  return y;
}

OutputArray<float> linear(const moe::Experts& experts, const SlotArray& x,
                          const InputArray<float, 2>& weights, int64_t slots, bool partial_sums,
                          Parallel& parallel, const std::string& isa_name) {
  const Isa isa = isa_from_name(isa_name);
  const auto rows = static_cast<int64_t>(weights.shape(0));
  const moe::SlotRows from = slot_rows(x, experts.in_features(), slots);
  check_shape("rows of x", static_cast<int64_t>(x.shape(0)), rows);
  check_shape("experts", static_cast<int64_t>(weights.shape(1)), experts.count());
  return bindings::linear_output(rows * slots, experts.out_features(), experts.segments(),
                                 partial_sums, [&](const LinearOutput& output) {
                                   moe::ExpertRows().linear(experts, from,
                                                            {weights.data(), experts.count()}, rows,
                                                            slots, output, parallel, isa);
                                 });
}

OutputArray<float> up(const moe::Experts& experts, const SlotArray& x,
                      const InputArray<float, 2>& weights, int64_t slots,
                      const std::optional<InputArray<float, 3>>& added, Parallel& parallel,
                      const std::string& isa_name) {
  const Isa isa = isa_from_name(isa_name);
  const auto rows = static_cast<int64_t>(x.shape(0));
  const moe::SlotRows from = slot_rows(x, experts.in_features(), slots);
  check_shape("rows of weights", static_cast<int64_t>(weights.shape(0)), rows);
  check_shape("experts", static_cast<int64_t>(weights.shape(1)), experts.count());
  const int64_t width = experts.out_features() / 2;
  auto h = bindings::new_array<float>(
      {static_cast<size_t>(rows), static_cast<size_t>(slots), static_cast<size_t>(width)});
  if (added) {
    check_shape("rows of what is added", static_cast<int64_t>(added->shape(0)), rows);
    check_shape("slots", static_cast<int64_t>(added->shape(1)), slots);
    check_shape("features", static_cast<int64_t>(added->shape(2)), 2 * width);
  }
  nb::gil_scoped_release release;
  moe::ExpertRows().up(experts, from, {weights.data(), experts.count()}, rows, slots,
                       added ? added->data() : nullptr, h.data(), parallel, isa);
  return h;
}

OutputArray<float> down(const moe::Experts& experts, const InputArray<float, 3>& h,
                        const InputArray<float, 2>& weights, bool partial_sums, Parallel& parallel,
                        const std::string& isa_name) {
  const Isa isa = isa_from_name(isa_name);
  const auto rows = static_cast<int64_t>(h.shape(0));
  check_shape("K", static_cast<int64_t>(h.shape(2)), experts.in_features());
  check_shape("rows of weights", static_cast<int64_t>(weights.shape(0)), rows);
  check_shape("experts", static_cast<int64_t>(weights.shape(1)), experts.count());
  return bindings::linear_output(rows, experts.out_features(), experts.segments(), partial_sums,
                                 [&](const LinearOutput& output) {
                                   moe::ExpertRows().down(
                                       experts, h.data(), {weights.data(), experts.count()}, rows,
                                       static_cast<int64_t>(h.shape(1)), output, parallel, isa);
                                 });
}

}  // namespace

void bind_moe(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("moe", "See plugins/moe/README.md.");
  m.def("route", &route, "logits"_a, "bias"_a.none(), "top_k"_a, "sigmoid"_a, "normalize"_a,
        "scale"_a, "groups"_a, "top_groups"_a, "parallel"_a);
  // Experts borrow the packed bytes.
  nb::class_<moe::Experts>(m, "Experts");
  m.def("nvfp4_experts", &nvfp4_experts, "packed"_a, "out_features"_a, "in_features"_a,
        "global_scales"_a, "input_scale"_a.none(), "bounds"_a.none(), nb::keep_alive<0, 1>());
  m.def("dense_experts", &dense_experts, "packed"_a, "dtype"_a, "count"_a, "out_features"_a,
        "in_features"_a, "bounds"_a.none(), nb::keep_alive<0, 1>());
  m.def("scale", &scale, "x"_a, "weights"_a, "vectors"_a, "slots"_a, "parallel"_a);
  m.def("linear", &linear, "experts"_a, "x"_a, "weights"_a, "slots"_a, "partial_sums"_a,
        "parallel"_a, "isa"_a);
  m.def("up", &up, "experts"_a, "x"_a, "weights"_a, "slots"_a, "added"_a.none(), "parallel"_a,
        "isa"_a);
  m.def("down", &down, "experts"_a, "h"_a, "weights"_a, "partial_sums"_a, "parallel"_a, "isa"_a);
}

}  // namespace trtree
