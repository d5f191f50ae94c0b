// trtree._core.nvfp4_linear: what plugins/nvfp4_linear/cpu.py checks and documents.
#include "plugins/linear_bindings.hpp"
#include "plugins/nvfp4_linear/nvfp4_linear.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

namespace {

using bindings::InputArray;
using bindings::OutputArray;

// Both release the GIL: a build packs and writes at the same time.
void pack(const bindings::Parts& codes, const bindings::Parts& block_scales, int64_t in_features,
          int64_t first, int64_t end, const bindings::PackedArray& packed, const std::string& isa) {
  const auto rows = bindings::stored_rows(codes, in_features / 2);
  const auto scales = bindings::stored_rows(block_scales, in_features / kBlock);
  const auto to = bindings::span(packed);
  const nb::gil_scoped_release release;
  nvfp4::pack({rows, scales}, in_features, first, end, to, isa_from_name(isa));
}

void quantize(const bindings::Parts& weight, const std::string& dtype_name, int64_t in_features,
              float global_scale, int64_t first, int64_t end, const bindings::PackedArray& packed,
              const std::string& isa) {
  const dense::DType dtype = dense::dtype_from_name(dtype_name);
  const auto rows = bindings::stored_rows(weight, in_features * dense::element_size(dtype));
  const auto to = bindings::span(packed);
  const nb::gil_scoped_release release;
  nvfp4::quantize(rows, dtype, in_features, global_scale, first, end, to, isa_from_name(isa));
}

nb::tuple quantize_rows(const InputArray<float, 2>& x, float input_scale, Parallel& parallel,
                        const std::string& isa) {
  const size_t rows = x.shape(0), k = x.shape(1);
  nvfp4::Input input;
  input.quantize(x.data(), rows, k, k, input_scale, parallel, isa_from_name(isa));
  auto values = bindings::new_array<int8_t>({rows, k});
  auto scales = bindings::new_array<float>({rows, k / kBlock});
  for (size_t r = 0; r < rows; ++r) {
    input.quantized_row(r, values.data() + r * k, scales.data() + r * (k / kBlock));
  }
  return nb::make_tuple(values, scales);
}

OutputArray<float> linear(const InputArray<uint8_t, 1>& packed, const InputArray<float, 2>& x,
                          int64_t out_features, float global_scale,
                          std::optional<float> input_scale,
                          const std::optional<InputArray<float, 1>>& bias,
                          const std::optional<std::vector<int64_t>>& bounds, bool partial_sums,
                          Parallel& parallel, const std::string& isa_name) {
  const Isa isa = isa_from_name(isa_name);
  const int64_t rows = x.shape(0), k = x.shape(1);
  const nvfp4::Weight weight = {
      .packed = bindings::span(packed),
      .out_features = out_features,
      .in_features = k,
      .global_scale = global_scale,
      .segments = bindings::segments(bounds, k),
      .bias = bindings::bias_of(bias, out_features),
  };
  return bindings::linear_output(
      rows, out_features, weight.segments, partial_sums, [&](const LinearOutput& output) {
        nvfp4::Input input;
        if (input_scale) {
          input.quantize(x.data(), rows, k, k, *input_scale, parallel, isa);
        } else {
          input.round_to_bf16(x.data(), rows, k, k, parallel, isa);
        }
        nvfp4::linear(weight, input, output, parallel, isa);
      });
}

}  // namespace

void bind_nvfp4_linear(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("nvfp4_linear", "See plugins/nvfp4_linear/README.md.");
  m.def("packed_size", &nvfp4::packed_size, "out_features"_a, "in_features"_a);
  m.def("output_scale", &nvfp4::output_scale, "global_scale"_a, "input_scale"_a.none());
  m.def("pack", &pack, "codes"_a, "block_scales"_a, "in_features"_a, "first"_a, "end"_a, "packed"_a,
        "isa"_a);
  m.def("quantize", &quantize, "weight"_a, "dtype"_a, "in_features"_a, "global_scale"_a, "first"_a,
        "end"_a, "packed"_a, "isa"_a);
  m.def("quantize_rows", &quantize_rows, "x"_a, "input_scale"_a, "parallel"_a, "isa"_a);
  m.def("linear", &linear, "packed"_a, "x"_a, "out_features"_a, "global_scale"_a,
        "input_scale"_a.none(), "bias"_a.none(), "bounds"_a.none(), "partial_sums"_a, "parallel"_a,
        "isa"_a);
}

}  // namespace trtree
