#include "runtime/cpp/cpu/plan_checks.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace trtree::cpu {

namespace {

using std::to_string;

void require(bool holds, const std::string& where, const std::string& what) {
  if (!holds) throw std::invalid_argument("plan: " + where + ": " + what);
}

template <typename T>
void check_index(int64_t index, const std::vector<T>& table, const std::string& where,
                 const char* what) {
  require(index >= 0 && index < static_cast<int64_t>(table.size()), where,
          std::string(what) + " " + to_string(index) + " of " + to_string(table.size()));
}

struct Arity {
  size_t inputs;
  size_t outputs;
};

// Tensors in buffers only; ids, positions and slots come with the step. kConcat takes any number,
// kSplitHeads gives any; kLatentAttention may have a selection too.
Arity arity(OpKind kind) {
  switch (kind) {
    case OpKind::kAdd:
    case OpKind::kExpertsDown:
    case OpKind::kExpertsLinear:
    case OpKind::kExpertsScale:
    case OpKind::kExpertsUp:
    case OpKind::kIndexSelect:
    case OpKind::kSigmoidMul:
    case OpKind::kSiluMul:
      return {2, 1};
    case OpKind::kGatedDeltaNet:
      return {5, 1};
    case OpKind::kArgmax:
    case OpKind::kLatentAppend:
    case OpKind::kTopKLogProbs:
      return {1, 0};
    case OpKind::kEmbedding:
      return {0, 1};
    case OpKind::kKvAppend:
      return {2, 0};
    case OpKind::kAllGather:
    case OpKind::kConcat:
    case OpKind::kGatherRows:
    case OpKind::kHeadKeys:
    case OpKind::kHeadValues:
    case OpKind::kLatentAttention:
    case OpKind::kLayerNorm:
    case OpKind::kLinear:
    case OpKind::kRmsNorm:
    case OpKind::kRotaryEmbedding:
    case OpKind::kRoute:
    case OpKind::kCausalConv:
    case OpKind::kScale:
    case OpKind::kSplitHeads:
    case OpKind::kTreeAttention:
      break;
  }
  return {1, 1};
}

void check_weight_use(const Plan& plan, const PlanOp& op, const std::string& where, int64_t in,
                      int64_t out) {
  check_index(op.weight, plan.weights, where, "weight");
  const PlanWeight& weight = plan.weights[op.weight];
  if (op.kind == OpKind::kRmsNorm) {
    require(
        weight.kind == WeightKind::kVector && op.heads > 0 && weight.out_features * op.heads == in,
        where, "a norm of " + to_string(weight.out_features) + " over " + to_string(in));
    return;
  }
  if (op.kind == OpKind::kScale) {
    require(
        weight.kind == WeightKind::kVector && op.heads > 0 && weight.out_features * op.heads == in,
        where, "a vector of " + to_string(weight.out_features) + " over " + to_string(in));
    return;
  }
  require(weight.kind != WeightKind::kVector, where, "a vector where a matrix is needed");
  require(weight.experts == 0, where, "experts where one matrix is needed");
  require(weight.head_sizes.empty(), where, "heads where one matrix is needed");
  const bool table = op.kind == OpKind::kEmbedding;
  require(table ? weight.in_features == out && weight.kind == WeightKind::kDense
                : weight.in_features == in && weight.out_features == out,
          where,
          "weight [" + to_string(weight.out_features) + ", " + to_string(weight.in_features) +
              "] between widths " + to_string(in) + " and " + to_string(out));
}

void check_route(const Plan& plan, const PlanOp& op, const std::string& where, int64_t width) {
  check_index(op.routing, plan.routings, where, "routing");
  plan.routings[op.routing].check();
  require(plan.routings[op.routing].experts == width, where,
          to_string(width) + " logits for " + to_string(plan.routings[op.routing].experts) +
              " experts");
  if (op.weight == -1) return;
  check_index(op.weight, plan.weights, where, "weight");
  const PlanWeight& bias = plan.weights[op.weight];
  require(bias.kind == WeightKind::kVector && bias.out_features == width, where,
          "a bias of " + to_string(bias.out_features));
}

// Of a part of the vocabulary: what is added to its ids, where there is such a vector.
void check_id_offsets(const Plan& plan, const PlanOp& op, const std::string& where, int64_t width) {
  if (op.weight == -1) return;
  check_index(op.weight, plan.weights, where, "weight");
  const PlanWeight& offsets = plan.weights[op.weight];
  require(offsets.kind == WeightKind::kVector && offsets.out_features == width, where,
          "offsets of " + to_string(offsets.out_features) + " ids for " + to_string(width));
}

// inputs: x or h, and the weights of each expert; of kExpertsUp also what is added, if anything.
void check_experts(const Plan& plan, const PlanNetwork& network, const PlanOp& op,
                   const std::string& where) {
  check_index(op.weight, plan.weights, where, "weight");
  const PlanWeight& weight = plan.weights[op.weight];
  const bool up = op.kind == OpKind::kExpertsUp, down = op.kind == OpKind::kExpertsDown;
  const PlanTensor& in = network.tensors[op.inputs[0]];
  const PlanTensor& out = network.tensors[op.outputs[0]];
  const PlanTensor& slots = down ? in : out;
  require(weight.experts > 0 && network.tensors[op.inputs[1]].width == weight.experts, where,
          to_string(weight.experts) + " experts, weights of " +
              to_string(network.tensors[op.inputs[1]].width));
  require(op.heads > 0 && slots.stride == slots.width, where,
          "its slots do not stand one after another");
  const bool in_slots = down || in.width > weight.in_features;
  require(!in_slots || in.stride == in.width, where, "its slots do not stand one after another");
  const int64_t in_features = in_slots ? in.width / op.heads : in.width;
  const int64_t out_features = down ? out.width : (up ? 2 : 1) * (out.width / op.heads);
  require(slots.width % op.heads == 0 && weight.in_features == in_features &&
              weight.out_features == out_features,
          where,
          "experts [" + to_string(weight.out_features) + ", " + to_string(weight.in_features) +
              "] between widths " + to_string(in.width) + " and " + to_string(out.width));
  if (op.inputs.size() < 3) return;
  const PlanTensor& added = network.tensors[op.inputs[2]];
  require(added.width == 2 * out.width && added.stride == added.width, where,
          "width " + to_string(added.width) + " added to " + to_string(2 * out.width));
}

void check_vector(const Plan& plan, const PlanOp& op, const std::string& where, int64_t size) {
  check_index(op.weight, plan.weights, where, "weight");
  const PlanWeight& weight = plan.weights[op.weight];
  require(weight.kind == WeightKind::kVector && weight.out_features == size, where,
          "a vector of " + to_string(weight.out_features) + " for " + to_string(size));
}

// inputs: x, and the weights of each expert. x may be a row, or one for every slot.
void check_experts_scale(const Plan& plan, const PlanNetwork& network, const PlanOp& op,
                         const std::string& where) {
  const PlanTensor& in = network.tensors[op.inputs[0]];
  const PlanTensor& out = network.tensors[op.outputs[0]];
  const bool in_slots = in.width == out.width;
  require(op.heads > 0 && out.width % op.heads == 0 && out.stride == out.width &&
              (!in_slots || in.stride == in.width),
          where, "its slots do not stand one after another");
  require(in_slots || in.width == out.width / op.heads, where,
          "width " + to_string(in.width) + " for " + to_string(op.heads) + " slots of " +
              to_string(out.width));
  check_vector(plan, op, where, network.tensors[op.inputs[1]].width * (out.width / op.heads));
}

void check_state_use(const Plan& plan, const PlanOp& op, const std::string& where, int64_t in) {
  check_index(op.state, plan.states, where, "state");
  const PlanState& state = plan.states[op.state];
  require(state.kind == StateKind::kKv, where, "its state is no KV");
  const bool attends = op.kind == OpKind::kTreeAttention;
  require(state.heads > 0 && state.head_dim > 0 && (!attends || op.heads % state.heads == 0), where,
          to_string(op.heads) + " heads over " + to_string(state.heads));
  require(in == (attends ? op.heads : state.heads) * state.head_dim, where,
          "width " + to_string(in) + " for heads of " + to_string(state.head_dim));
}

// A norm's weight and bias after one another.
void check_layer_norm(const Plan& plan, const PlanOp& op, const std::string& where, int64_t width) {
  require(op.heads > 0 && width % op.heads == 0, where, "its parts do not fit its width");
  check_vector(plan, op, where, 2 * (width / op.heads));
}

void check_heads(const Plan& plan, const PlanOp& op, const std::string& where, int64_t in,
                 int64_t out) {
  check_index(op.weight, plan.weights, where, "weight");
  const PlanWeight& weight = plan.weights[op.weight];
  require(weight.head_sizes.size() == 2, where, "a weight without heads");
  const int64_t keys = weight.head_sizes[0], values = weight.head_sizes[1];
  const int64_t heads = weight.out_features / (keys + values);
  const bool of_keys = op.kind == OpKind::kHeadKeys;
  require(in == heads * (of_keys ? keys : weight.in_features) &&
              out == heads * (of_keys ? weight.in_features : values),
          where,
          to_string(heads) + " heads [" + to_string(keys) + " + " + to_string(values) + ", " +
              to_string(weight.in_features) + "] between widths " + to_string(in) + " and " +
              to_string(out));
}

int64_t latent_dim(const Plan& plan, const PlanOp& op, const std::string& where) {
  check_index(op.state, plan.states, where, "state");
  const PlanState& state = plan.states[op.state];
  require(state.kind == StateKind::kLatent && state.heads == 1 && state.head_dim > 0, where,
          "its state is no latent");
  return state.head_dim;
}

// inputs: x; or q and the weights of each head; or q and a selection, if there is one.
void check_latent(const Plan& plan, const PlanNetwork& network, const PlanOp& op,
                  const std::string& where) {
  const int64_t dim = latent_dim(plan, op, where);
  const int64_t in = network.tensors[op.inputs[0]].width;
  const int64_t heads = op.kind == OpKind::kLatentAppend ? 1 : op.heads;
  require(heads > 0 && in == heads * dim, where,
          "width " + to_string(in) + " for " + to_string(heads) + " of " + to_string(dim));
  if (op.kind == OpKind::kIndexSelect) {
    const int64_t weights = network.tensors[op.inputs[1]].width;
    require(weights == heads, where,
            to_string(weights) + " weights for " + to_string(heads) + " heads");
  }
  if (op.kind != OpKind::kLatentAttention) return;
  const int64_t out = network.tensors[op.outputs[0]].width;
  require(out % heads == 0 && out / heads <= dim, where, "result of width " + to_string(out));
  if (op.inputs.size() == 1) return;
  const bool chosen = std::any_of(network.ops.begin(), network.ops.end(), [&](const PlanOp& other) {
    return other.kind == OpKind::kIndexSelect && other.outputs.size() == 1 &&
           other.outputs[0] == op.inputs[1];
  });
  require(chosen, where, "its selection is none");
}

void check_conv(const Plan& plan, const PlanOp& op, const std::string& where, int64_t width) {
  check_index(op.state, plan.states, where, "state");
  const PlanState& state = plan.states[op.state];
  require(state.kind == StateKind::kConv && state.heads > 0 && state.head_dim == width, where,
          "width " + to_string(width) + " for a window of " + to_string(state.head_dim));
  check_vector(plan, op, where, (state.heads + 1) * width);
}

// inputs: q, k, v, a, b.
void check_delta(const Plan& plan, const PlanNetwork& network, const PlanOp& op,
                 const std::string& where) {
  check_index(op.state, plan.states, where, "state");
  const PlanState& state = plan.states[op.state];
  require(state.kind == StateKind::kRecurrent && state.heads > 0 && state.head_dim > 0 &&
              state.value_dim > 0 && op.heads > 0 && state.heads % op.heads == 0,
          where, to_string(state.heads) + " heads of values, " + to_string(op.heads) + " of keys");
  const int64_t keys = op.heads * state.head_dim, values = state.heads * state.value_dim;
  const int64_t widths[] = {keys, keys, values, state.heads, state.heads};
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    const int64_t width = network.tensors[op.inputs[i]].width;
    require(width == widths[i], where,
            "operand " + to_string(i) + " of width " + to_string(width) + " for " +
                to_string(widths[i]));
  }
  require(network.tensors[op.outputs[0]].width == values, where, "its result's width");
  check_vector(plan, op, where, 2 * state.heads);
}

void check_parts(const PlanNetwork& network, const PlanOp& op, const std::string& where,
                 const std::vector<int32_t>& parts, int64_t width) {
  int64_t total = 0;
  bool whole = op.heads > 0;
  for (const int32_t part : parts) {
    const int64_t size = network.tensors[part].width;
    total += size;
    whole = whole && size % op.heads == 0;
  }
  require(whole && total == width, where, "its parts do not fit " + to_string(width));
}

void check_gather(const Plan& plan, const PlanOp& op, const std::string& where, int64_t in,
                  int64_t out) {
  const std::vector<int64_t>& bounds = op.rank_columns;
  require(static_cast<int32_t>(bounds.size()) == plan.ranks + 1 && bounds.front() == 0 &&
              bounds.back() == out && std::is_sorted(bounds.begin(), bounds.end()),
          where, "rank_columns do not cover " + to_string(out) + " columns");
  const int64_t own = bounds[plan.rank + 1] - bounds[plan.rank];
  require(in == own, where, to_string(in) + " columns, this rank has " + to_string(own));
}

void check_op(const Plan& plan, const PlanNetwork& network, const PlanOp& op,
              const std::string& where) {
  for (const int32_t tensor : op.inputs) check_index(tensor, network.tensors, where, "tensor");
  for (const int32_t tensor : op.outputs) check_index(tensor, network.tensors, where, "tensor");
  const Arity expected = arity(op.kind);
  const bool extra = op.kind == OpKind::kLatentAttention || op.kind == OpKind::kExpertsUp;
  const size_t more = extra && op.inputs.size() > expected.inputs ? 1 : 0;
  const bool fits =
      op.kind == OpKind::kConcat ? !op.inputs.empty() : op.inputs.size() == expected.inputs + more;
  const bool gives =
      op.kind == OpKind::kSplitHeads ? !op.outputs.empty() : op.outputs.size() == expected.outputs;
  require(fits && gives, where, "wrong number of operands");
  const int64_t in = op.inputs.empty() ? 0 : network.tensors[op.inputs[0]].width;
  const int64_t out = op.outputs.empty() ? 0 : network.tensors[op.outputs[0]].width;
  int64_t total = 0;
  for (const int32_t tensor : op.inputs) total += network.tensors[tensor].width;
  switch (op.kind) {
    case OpKind::kEmbedding:
    case OpKind::kLinear:
    case OpKind::kRmsNorm:
    case OpKind::kScale:
      check_weight_use(plan, op, where, in, out);
      break;
    case OpKind::kAllGather:
      check_gather(plan, op, where, in, out);
      break;
    case OpKind::kExpertsDown:
    case OpKind::kExpertsLinear:
    case OpKind::kExpertsUp:
      check_experts(plan, network, op, where);
      return;
    case OpKind::kExpertsScale:
      check_experts_scale(plan, network, op, where);
      return;
    case OpKind::kCausalConv:
      check_conv(plan, op, where, in);
      break;
    case OpKind::kGatedDeltaNet:
      check_delta(plan, network, op, where);
      return;
    case OpKind::kSplitHeads:
      check_parts(network, op, where, op.outputs, in);
      return;
    case OpKind::kConcat:
      check_parts(network, op, where, op.inputs, out);
      return;
    case OpKind::kHeadKeys:
    case OpKind::kHeadValues:
      check_heads(plan, op, where, in, out);
      return;
    case OpKind::kIndexSelect:
    case OpKind::kLatentAppend:
    case OpKind::kLatentAttention:
      check_latent(plan, network, op, where);
      return;
    case OpKind::kLayerNorm:
      check_layer_norm(plan, op, where, in);
      break;
    case OpKind::kSigmoidMul:
      require(total == 2 * in || total == in + 1, where, "operands differ in width");
      break;
    case OpKind::kRoute:
      check_route(plan, op, where, in);
      break;
    case OpKind::kTopKLogProbs:
      check_id_offsets(plan, op, where, in);
      break;
    case OpKind::kKvAppend:
      require(total == 2 * in, where, "keys and values differ in width");
      check_state_use(plan, op, where, in);
      break;
    case OpKind::kTreeAttention:
      check_state_use(plan, op, where, in);
      break;
    case OpKind::kRotaryEmbedding:
      check_index(op.rope, plan.ropes, where, "rope");
      require(op.heads > 0 && in % op.heads == 0 &&
                  static_cast<int64_t>(2 * plan.ropes[op.rope].inv_freq.size()) <= in / op.heads,
              where, "rotary dimensions do not fit its heads");
      break;
    case OpKind::kAdd:
    case OpKind::kSiluMul:
      require(total == 2 * in, where, "operands differ in width");
      break;
    default:
      break;
  }
  const bool free = op.outputs.empty() || op.kind == OpKind::kEmbedding ||
                    op.kind == OpKind::kLinear || op.kind == OpKind::kAllGather;
  require(free || in == out, where, "result of width " + to_string(out));
}

void check_network(const Plan& plan, const std::string& name, const PlanNetwork& network) {
  for (size_t i = 0; i < network.tensors.size(); ++i) {
    const PlanTensor& tensor = network.tensors[i];
    const std::string where = name + ": tensor " + to_string(i);
    check_index(tensor.buffer, network.buffers, where, "buffer");
    const int64_t width = network.buffers[tensor.buffer].width;
    require(tensor.offset >= 0 && tensor.width > 0 && tensor.stride <= width &&
                tensor.offset + tensor.width <= tensor.stride,
            where,
            "columns " + to_string(tensor.offset) + " + " + to_string(tensor.width) +
                " of rows of " + to_string(tensor.stride) + " in a buffer of " + to_string(width));
  }
  for (const PlanOp& op : network.ops) check_op(plan, network, op, name + ": " + op.name);
  for (const int32_t role : {network.captured_input, network.captured_output, network.logits}) {
    if (role != -1) check_index(role, network.tensors, name, "tensor");
  }
}

void check_state(const PlanState& state) {
  if (state.dtype == "float32") return;
  const auto positive = [](float scale) { return scale > 0 && std::isfinite(scale); };
  require(state.fp8() && state.kind == StateKind::kKv, "state", state.dtype + " is not known");
  require(positive(state.k_scale) && positive(state.v_scale), "state",
          "FP8 scales " + to_string(state.k_scale) + " and " + to_string(state.v_scale) +
              " must be above 0");
  require(state.head_dim % kBlock == 0, "state",
          "FP8 heads of " + to_string(state.head_dim) + " are no multiple of " + to_string(kBlock));
}

}  // namespace

void check_plan(const Plan& plan) {
  require(plan.rank >= 0 && plan.rank < plan.ranks, "rank",
          to_string(plan.rank) + " of " + to_string(plan.ranks));
  for (const PlanWeight& weight : plan.weights) {
    require(weight.offset >= 0 && weight.offset % kPackedAlignment == 0 && weight.bytes >= 0 &&
                weight.out_features > 0 && weight.in_features >= 0 && weight.bias_offset >= -1,
            weight.name,
            "offset " + to_string(weight.offset) + ", " + to_string(weight.bytes) +
                " bytes, bias at " + to_string(weight.bias_offset));
    require(weight.kind != WeightKind::kVector || weight.bytes == 4 * weight.out_features,
            weight.name,
            to_string(weight.bytes) + " bytes for a vector of " + to_string(weight.out_features));
    const auto& sizes = weight.head_sizes;
    require(sizes.empty() || (weight.kind == WeightKind::kDense && sizes.size() == 2 &&
                              sizes[0] > 0 && sizes[1] > 0 && weight.in_features > 0 &&
                              weight.out_features % (sizes[0] + sizes[1]) == 0),
            weight.name, "its heads do not fit " + to_string(weight.out_features) + " rows");
    require(
        weight.experts >= 0 && (weight.kind != WeightKind::kNvfp4 ||
                                weight.expert_scales.size() == static_cast<size_t>(weight.experts)),
        weight.name,
        to_string(weight.expert_scales.size()) + " scales for " + to_string(weight.experts) +
            " experts");
  }
  for (const PlanState& state : plan.states) check_state(state);
  const auto target = plan.networks.find("target");
  require(target != plan.networks.end() && target->second.logits != -1, "target", "missing");
  const bool context = plan.networks.contains("drafter_context");
  require(context == plan.networks.contains("drafter_block"), "drafter", "half of it is missing");
  for (const auto& [name, network] : plan.networks) check_network(plan, name, network);
  if (context) {
    const PlanNetwork& drafter = plan.networks.at("drafter_context");
    require(drafter.captured_input != -1 && target->second.captured_output != -1 &&
                drafter.tensors[drafter.captured_input].width ==
                    target->second.tensors[target->second.captured_output].width,
            "drafter_context", "its input is not what the target captures");
  }
}

void check_ranks(const Plan& plan, const Collectives* collectives) {
  const int32_t rank = collectives == nullptr ? 0 : collectives->rank();
  const int32_t size = collectives == nullptr ? 1 : collectives->size();
  require(plan.rank == rank && plan.ranks == size, plan.directory,
          "made for rank " + to_string(plan.rank) + " of " + to_string(plan.ranks) +
              ", loaded as rank " + to_string(rank) + " of " + to_string(size));
}

}  // namespace trtree::cpu
