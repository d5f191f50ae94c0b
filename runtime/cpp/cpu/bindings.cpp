// The CPU engine and its plan, seen from Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "runtime/cpp/cpu/cpu_engine.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

namespace {

using namespace cpu;

void bind_kinds(nb::module_& m) {
  nb::enum_<OpKind>(m, "OpKind")
      .value("add", OpKind::kAdd)
      .value("all_gather", OpKind::kAllGather)
      .value("argmax", OpKind::kArgmax)
      .value("causal_conv", OpKind::kCausalConv)
      .value("concat", OpKind::kConcat)
      .value("embedding", OpKind::kEmbedding)
      .value("experts_down", OpKind::kExpertsDown)
      .value("experts_linear", OpKind::kExpertsLinear)
      .value("experts_scale", OpKind::kExpertsScale)
      .value("experts_up", OpKind::kExpertsUp)
      .value("gated_delta_net", OpKind::kGatedDeltaNet)
      .value("gather_rows", OpKind::kGatherRows)
      .value("head_keys", OpKind::kHeadKeys)
      .value("head_values", OpKind::kHeadValues)
      .value("index_select", OpKind::kIndexSelect)
      .value("kv_append", OpKind::kKvAppend)
      .value("latent_append", OpKind::kLatentAppend)
      .value("latent_attention", OpKind::kLatentAttention)
      .value("layer_norm", OpKind::kLayerNorm)
      .value("linear", OpKind::kLinear)
      .value("rms_norm", OpKind::kRmsNorm)
      .value("rotary_embedding", OpKind::kRotaryEmbedding)
      .value("route", OpKind::kRoute)
      .value("scale", OpKind::kScale)
      .value("sigmoid_mul", OpKind::kSigmoidMul)
      .value("silu_mul", OpKind::kSiluMul)
      .value("split_heads", OpKind::kSplitHeads)
      .value("top_k_log_probs", OpKind::kTopKLogProbs)
      .value("tree_attention", OpKind::kTreeAttention);
  nb::enum_<WeightKind>(m, "WeightKind")
      .value("nvfp4", WeightKind::kNvfp4)
      .value("dense", WeightKind::kDense)
      .value("vector", WeightKind::kVector);
  nb::enum_<StateKind>(m, "StateKind")
      .value("kv", StateKind::kKv)
      .value("latent", StateKind::kLatent)
      .value("conv", StateKind::kConv)
      .value("recurrent", StateKind::kRecurrent);
}

// Plan structs are filled attribute by attribute from plan.json (runtime/engines/cpu.py).
void bind_networks(nb::module_& m) {
  nb::class_<PlanTensor>(m, "PlanTensor")
      .def(nb::init<>())
      .def_rw("buffer", &PlanTensor::buffer)
      .def_rw("offset", &PlanTensor::offset)
      .def_rw("width", &PlanTensor::width)
      .def_rw("stride", &PlanTensor::stride);
  nb::class_<PlanBuffer>(m, "PlanBuffer")
      .def(nb::init<>())
      .def_rw("width", &PlanBuffer::width)
      .def_rw("per_output", &PlanBuffer::per_output);
  nb::class_<PlanOp>(m, "PlanOp")
      .def(nb::init<>())
      .def_rw("kind", &PlanOp::kind)
      .def_rw("name", &PlanOp::name)
      .def_rw("inputs", &PlanOp::inputs)
      .def_rw("outputs", &PlanOp::outputs)
      .def_rw("weight", &PlanOp::weight)
      .def_rw("state", &PlanOp::state)
      .def_rw("rope", &PlanOp::rope)
      .def_rw("routing", &PlanOp::routing)
      .def_rw("heads", &PlanOp::heads)
      .def_rw("scale", &PlanOp::scale)
      .def_rw("eps", &PlanOp::eps)
      .def_rw("window", &PlanOp::window)
      .def_rw("causal_mask", &PlanOp::causal_mask)
      .def_rw("row_parallel", &PlanOp::row_parallel)
      .def_rw("rank_columns", &PlanOp::rank_columns);
  nb::class_<PlanNetwork>(m, "PlanNetwork")
      .def(nb::init<>())
      .def_rw("buffers", &PlanNetwork::buffers)
      .def_rw("tensors", &PlanNetwork::tensors)
      .def_rw("ops", &PlanNetwork::ops)
      .def_rw("captured_input", &PlanNetwork::captured_input)
      .def_rw("captured_output", &PlanNetwork::captured_output)
      .def_rw("logits", &PlanNetwork::logits);
}

void bind_plan(nb::module_& m) {
  nb::class_<PlanWeight>(m, "PlanWeight")
      .def(nb::init<>())
      .def_rw("name", &PlanWeight::name)
      .def_rw("kind", &PlanWeight::kind)
      .def_rw("file", &PlanWeight::file)
      .def_rw("offset", &PlanWeight::offset)
      .def_rw("bytes", &PlanWeight::bytes)
      .def_rw("bias_offset", &PlanWeight::bias_offset)
      .def_rw("out_features", &PlanWeight::out_features)
      .def_rw("in_features", &PlanWeight::in_features)
      .def_rw("dtype", &PlanWeight::dtype)
      .def_rw("global_scale", &PlanWeight::global_scale)
      .def_rw("input_scale", &PlanWeight::input_scale)
      .def_rw("experts", &PlanWeight::experts)
      .def_rw("expert_scales", &PlanWeight::expert_scales)
      .def_rw("segments", &PlanWeight::segments)
      .def_rw("head_sizes", &PlanWeight::head_sizes);
  nb::class_<PlanState>(m, "PlanState")
      .def(nb::init<>())
      .def_rw("kind", &PlanState::kind)
      .def_rw("dtype", &PlanState::dtype)
      .def_rw("k_scale", &PlanState::k_scale)
      .def_rw("v_scale", &PlanState::v_scale)
      .def_rw("heads", &PlanState::heads)
      .def_rw("head_dim", &PlanState::head_dim)
      .def_rw("value_dim", &PlanState::value_dim)
      .def_rw("drafter", &PlanState::drafter);
  nb::class_<PlanRope>(m, "PlanRope")
      .def(nb::init<>())
      .def_rw("inv_freq", &PlanRope::inv_freq)
      .def_rw("scaling", &PlanRope::scaling)
      .def_rw("interleaved", &PlanRope::interleaved);
  nb::class_<moe::Routing>(m, "PlanRouting")
      .def(nb::init<>())
      .def_rw("experts", &moe::Routing::experts)
      .def_rw("top_k", &moe::Routing::top_k)
      .def_rw("sigmoid", &moe::Routing::sigmoid)
      .def_rw("normalize", &moe::Routing::normalize)
      .def_rw("scale", &moe::Routing::scale)
      .def_rw("groups", &moe::Routing::groups)
      .def_rw("top_groups", &moe::Routing::top_groups);
  nb::class_<Plan>(m, "Plan")
      .def(nb::init<>())
      .def_rw("directory", &Plan::directory)
      .def_rw("rank", &Plan::rank)
      .def_rw("ranks", &Plan::ranks)
      .def_rw("networks", &Plan::networks)
      .def_rw("weights", &Plan::weights)
      .def_rw("states", &Plan::states)
      .def_rw("ropes", &Plan::ropes)
      .def_rw("routings", &Plan::routings);
}

// Collectives whose exchange is a Python function: for ranks that are threads, or any
// transport that Python has.
class PythonCollectives final : public Collectives {
 public:
  PythonCollectives(int32_t rank, int32_t size, nb::object exchange)
      : rank_(rank), size_(size), exchange_(std::move(exchange)) {}

  int32_t rank() const override { return rank_; }
  int32_t size() const override { return size_; }
  void all_gather(std::span<const float> mine, std::span<float> all) override {
    const nb::gil_scoped_acquire gil;
    // An owner, even None, makes these views.
    exchange_(
        nb::ndarray<nb::numpy, const float, nb::ndim<1>>(mine.data(), {mine.size()}, nb::none()),
        nb::ndarray<nb::numpy, float, nb::ndim<1>>(all.data(), {all.size()}, nb::none()));
  }

 private:
  const int32_t rank_, size_;
  const nb::object exchange_;
};

void bind_collectives(nb::module_& m) {
  nb::class_<Collectives>(m, "Collectives",
                          "How ranks put their parts together; see cpu/collectives.hpp.")
      .def_prop_ro("rank", &Collectives::rank)
      .def_prop_ro("size", &Collectives::size);
  nb::class_<PythonCollectives, Collectives>(m, "PythonCollectives")
      .def(nb::init<int32_t, int32_t, nb::object>(), "rank"_a, "size"_a, "all_gather"_a,
           "all_gather(mine, all) fills `all` with every rank's `mine` in order: float32 arrays "
           "that are valid until it returns.");
}

nb::list copies(const std::vector<Matrix>& matrices) {
  nb::list result;
  for (const Matrix& matrix : matrices) {
    auto* const data = new float[matrix.rows * matrix.width];
    for (int64_t r = 0; r < matrix.rows; ++r) {
      std::copy_n(matrix.row(r), matrix.width, data + r * matrix.width);
    }
    const nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
    result.append(nb::ndarray<nb::numpy, float, nb::ndim<2>>(
        data, {static_cast<size_t>(matrix.rows), static_cast<size_t>(matrix.width)}, owner));
  }
  return result;
}

}  // namespace

void bind_cpu_engine(nb::module_& m) {
  nb::module_ sub = m.def_submodule("cpu", "The CPU engine and its plan.");
  bind_kinds(sub);
  bind_networks(sub);
  bind_plan(sub);
  bind_collectives(sub);
  nb::class_<CpuEngine, Engine>(sub, "CpuEngine", "Runs a plan; see runtime/cpp/cpu.")
      .def(
          "__init__",
          [](CpuEngine* self, Plan plan, Capabilities capabilities, int32_t mask_token_id,
             int num_threads, const std::string& isa, Collectives* collectives) {
            new (self) CpuEngine(std::move(plan), std::move(capabilities), mask_token_id,
                                 num_threads, isa_from_name(isa), collectives);
          },
          "plan"_a, "capabilities"_a, "mask_token_id"_a, "num_threads"_a, "isa"_a = "",
          "collectives"_a.none() = nullptr, nb::keep_alive<1, 7>(),
          nb::call_guard<nb::gil_scoped_release>())
      .def(
          "observe",
          [](CpuEngine& self, nb::object callback) {
            if (callback.is_none()) return self.observe({});
            self.observe([callback](const std::string& network, const PlanOp& op,
                                    const std::vector<Matrix>& inputs,
                                    const std::vector<Matrix>& outputs) {
              const nb::gil_scoped_acquire gil;
              callback(network, op.name, copies(inputs), copies(outputs));
            });
          },
          "callback"_a.none(),
          "Call callback(network, op, inputs, outputs) after every op, with copies "
          "float32 [rows, width]; None ends it.");
}

}  // namespace trtree
