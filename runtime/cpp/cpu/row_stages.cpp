#include "runtime/cpp/cpu/row_stages.hpp"

#include <map>
#include <span>
#include <utility>

namespace trtree::cpu {

namespace {

// The tensors that a stage may touch. A row of a buffer must be the same floats for all of them:
// with another stride it would reach into rows that other threads work on.
class Layout {
 public:
  Layout(const PlanNetwork& network, bool per_output)
      : network_(network), per_output_(per_output) {}

  // False, with nothing added, if they do not fit to those added before or to each other.
  bool add(std::span<const int32_t> tensors) {
    auto strides = strides_;
    for (const int32_t index : tensors) {
      const PlanTensor& tensor = network_.tensors[index];
      const int64_t stride = strides.try_emplace(tensor.buffer, tensor.stride).first->second;
      if (stride != tensor.stride) return false;
      if (network_.buffers[tensor.buffer].per_output != per_output_) return false;
    }
    strides_ = std::move(strides);
    return true;
  }

 private:
  const PlanNetwork& network_;
  const bool per_output_;
  std::map<int32_t, int64_t> strides_;  // by buffer
};

std::vector<int32_t> tensors_of(const PlanOp& op) {
  std::vector<int32_t> tensors = op.inputs;
  tensors.insert(tensors.end(), op.outputs.begin(), op.outputs.end());
  return tensors;
}

Stage row_stage(const PlanNetwork& network, const std::vector<PlanWeight>& weights, size_t first) {
  const PlanTensor& any = network.tensors[network.ops[first].inputs[0]];
  Stage stage{static_cast<int32_t>(first), 0, true, network.buffers[any.buffer].per_output};
  Layout layout(network, stage.per_output);
  size_t next = first;
  for (; next < network.ops.size() && is_row_local(network.ops[next].kind); ++next) {
    const PlanOp& op = network.ops[next];
    if (!layout.add(tensors_of(op))) break;
    for (const int32_t output : op.outputs) stage.width += network.tensors[output].width;
    ++stage.count;
  }
  if (stage.count == 0) return {static_cast<int32_t>(first), 1};  // no layout suits: one op alone
  if (next == network.ops.size() || network.ops[next].kind != OpKind::kLinear) return stage;
  const PlanOp& linear = network.ops[next];
  const bool nvfp4 = weights[linear.weight].kind == WeightKind::kNvfp4;
  stage.prepares = nvfp4 && layout.add(linear.inputs);
  if (stage.prepares) stage.width += network.tensors[linear.inputs[0]].width;
  return stage;
}

}  // namespace

bool is_row_local(OpKind kind) {
  switch (kind) {
    case OpKind::kAdd:
    case OpKind::kConcat:
    case OpKind::kKvAppend:
    case OpKind::kLayerNorm:
    case OpKind::kRmsNorm:
    case OpKind::kRotaryEmbedding:
    case OpKind::kScale:
    case OpKind::kSigmoidMul:
    case OpKind::kSiluMul:
    case OpKind::kSplitHeads:
      return true;
    default:
      return false;
  }
}

std::vector<Stage> make_stages(const PlanNetwork& network, const std::vector<PlanWeight>& weights) {
  std::vector<Stage> stages;
  for (size_t next = 0; next < network.ops.size(); next = stages.back().end()) {
    const bool by_rows = is_row_local(network.ops[next].kind);
    stages.push_back(by_rows ? row_stage(network, weights, next)
                             : Stage{static_cast<int32_t>(next), 1});
  }
  return stages;
}

}  // namespace trtree::cpu
