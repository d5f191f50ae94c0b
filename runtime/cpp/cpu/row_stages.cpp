#include "runtime/cpp/cpu/row_stages.hpp"

#include <algorithm>
#include <map>
#include <span>

namespace trtree::cpu {

namespace {

// The tensors that a stage may touch. A row of a buffer must be the same floats for all of them:
// with another stride it would reach into rows that other threads work on.
class Layout {
 public:
  explicit Layout(const PlanNetwork& network) : network_(network) {}

  bool admits(std::span<const int32_t> tensors) const {
    return std::all_of(tensors.begin(), tensors.end(), [&](int32_t index) {
      const PlanTensor& tensor = network_.tensors[index];
      const auto found = strides_.find(tensor.buffer);
      return found == strides_.end() ? strides_.empty() || same_rows(tensor.buffer)
                                     : found->second == tensor.stride;
    });
  }
  // False, with nothing added, if they do not fit to those added before or to each other.
  bool add(std::span<const int32_t> tensors) {
    const auto before = strides_;
    for (const int32_t& index : tensors) {
      if (!admits({&index, 1})) {
        strides_ = before;
        return false;
      }
      strides_[network_.tensors[index].buffer] = network_.tensors[index].stride;
    }
    return true;
  }

 private:
  bool same_rows(int32_t buffer) const {
    return network_.buffers[buffer].per_output ==
           network_.buffers[strides_.begin()->first].per_output;
  }

  const PlanNetwork& network_;
  std::map<int32_t, int64_t> strides_;  // by buffer
};

std::vector<int32_t> tensors_of(const PlanOp& op) {
  std::vector<int32_t> tensors = op.inputs;
  tensors.insert(tensors.end(), op.outputs.begin(), op.outputs.end());
  return tensors;
}

Stage row_stage(const PlanNetwork& network, const std::vector<PlanWeight>& weights, size_t first) {
  Layout layout(network);
  Stage stage{static_cast<int32_t>(first), 0, true};
  const PlanTensor& any = network.tensors[network.ops[first].inputs[0]];
  stage.per_output = network.buffers[any.buffer].per_output;
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
