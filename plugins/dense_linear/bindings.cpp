// trtree._core.dense_linear: what plugins/dense_linear/cpu.py checks and documents.
#include "plugins/dense_linear/dense_linear.hpp"
#include "plugins/linear_bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

namespace {

using bindings::InputArray;
using bindings::OutputArray;

// Both release the GIL: a build packs and writes at the same time.
bool pack(const bindings::Parts& weight, const std::string& dtype_name, int64_t in_features,
          int64_t first, int64_t end, const bindings::PackedArray& packed, const std::string& isa) {
  const dense::DType dtype = dense::dtype_from_name(dtype_name);
  const auto rows = bindings::stored_rows(weight, in_features * dense::element_size(dtype));
  const auto to = bindings::span(packed);
  const nb::gil_scoped_release release;
  return dense::pack(rows, in_features, dtype, first, end, to, isa_from_name(isa));
}

float largest_magnitude(const bindings::Parts& weight, const std::string& dtype_name,
                        int64_t in_features) {
  const dense::DType dtype = dense::dtype_from_name(dtype_name);
  const auto rows = bindings::stored_rows(weight, in_features * dense::element_size(dtype));
  const nb::gil_scoped_release release;
  return dense::largest_magnitude(rows, in_features, dtype);
}

OutputArray<float> linear(const InputArray<uint8_t, 1>& packed, const std::string& dtype,
                          const InputArray<float, 2>& x, int64_t out_features,
                          const std::optional<InputArray<float, 1>>& bias,
                          const std::optional<std::vector<int64_t>>& bounds, bool partial_sums,
                          Parallel& parallel, const std::string& isa_name) {
  const Isa isa = isa_from_name(isa_name);
  const int64_t rows = x.shape(0), k = x.shape(1);
  const dense::Weight weight = {
      .packed = bindings::span(packed),
      .out_features = out_features,
      .in_features = k,
      .dtype = dense::dtype_from_name(dtype),
      .segments = bindings::segments(bounds, k),
      .bias = bindings::bias_of(bias, out_features),
  };
  return bindings::linear_output(rows, out_features, weight.segments, partial_sums,
                                 [&](const LinearOutput& output) {
                                   dense::Input input;
                                   input.assign(x.data(), rows, k, k);
                                   dense::linear(weight, input, output, parallel, isa);
                                 });
}

OutputArray<float> unpack_row(const InputArray<uint8_t, 1>& packed, const std::string& dtype,
                              int64_t out_features, int64_t in_features, int64_t row) {
  check_packed("dense", bindings::span(packed),
               dense::packed_size(out_features, in_features, dense::dtype_from_name(dtype)),
               out_features, in_features);
  const dense::Weight weight = {.packed = bindings::span(packed),
                                .out_features = out_features,
                                .in_features = in_features,
                                .dtype = dense::dtype_from_name(dtype),
                                .segments = {}};
  auto out = bindings::new_array<float>({static_cast<size_t>(in_features)});
  dense::unpack_row(weight, row, out.data());
  return out;
}

}  // namespace

void bind_dense_linear(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("dense_linear", "See plugins/dense_linear/README.md.");
  m.def(
      "packed_size",
      [](int64_t out_features, int64_t in_features, const std::string& dtype) {
        return dense::packed_size(out_features, in_features, dense::dtype_from_name(dtype));
      },
      "out_features"_a, "in_features"_a, "dtype"_a);
  m.def("pack", &pack, "weight"_a, "dtype"_a, "in_features"_a, "first"_a, "end"_a, "packed"_a,
        "isa"_a);
  m.def("largest_magnitude", &largest_magnitude, "weight"_a, "dtype"_a, "in_features"_a);
  m.def("linear", &linear, "packed"_a, "dtype"_a, "x"_a, "out_features"_a, "bias"_a.none(),
        "bounds"_a.none(), "partial_sums"_a, "parallel"_a, "isa"_a);
  m.def("unpack_row", &unpack_row, "packed"_a, "dtype"_a, "out_features"_a, "in_features"_a,
        "row"_a);
}

}  // namespace trtree
