#include "runtime/cpp/cpu/network_runner.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "plugins/ddtree/ddtree.hpp"

namespace trtree::cpu {

WeightTable::WeightTable(const Plan& plan) {
  for (size_t i = 0; i < plan.weights.size(); ++i) {
    const PlanWeight& weight = plan.weights[i];
    const auto& file =
        files_.try_emplace(weight.file, plan.directory + "/" + weight.file).first->second;
    const int64_t bias_end =
        weight.bias_offset < 0 ? 0 : weight.bias_offset + 4 * weight.out_features;
    const auto size = static_cast<int64_t>(file.bytes().size());
    if (weight.offset + weight.bytes > size || bias_end > size) {
      throw std::runtime_error(plan.directory + "/" + weight.file + ": " + std::to_string(size) +
                               " bytes, the plan reads up to " +
                               std::to_string(std::max(weight.offset + weight.bytes, bias_end)));
    }
    const auto bytes = file.bytes().subspan(weight.offset, weight.bytes);
    const float* const bias =
        weight.bias_offset < 0
            ? nullptr
            : reinterpret_cast<const float*>(file.bytes().data() + weight.bias_offset);
    const auto index = static_cast<int32_t>(i);
    if (weight.kind == WeightKind::kVector) {
      vectors_[index] = reinterpret_cast<const float*>(bytes.data());
      continue;
    }
    add_matrix(index, weight, bytes, bias);
  }
  add_taps(plan);
}

void WeightTable::add_taps(const Plan& plan) {
  for (const auto& [name, network] : plan.networks) {
    for (const PlanOp& op : network.ops) {
      if (op.kind != OpKind::kCausalConv) continue;
      const int64_t channels = plan.states[op.state].head_dim,
                    kernel = 1 + plan.states[op.state].heads;
      std::vector<float>& taps = taps_[op.weight];
      taps.resize(channels * kernel);
      for (int64_t i = 0; i < channels * kernel; ++i) {
        taps[i % kernel * channels + i / kernel] = vectors_.at(op.weight)[i];
      }
    }
  }
}

void WeightTable::add_matrix(int32_t index, const PlanWeight& weight,
                             std::span<const uint8_t> bytes, const float* bias) {
  if (!weight.head_sizes.empty()) return add_heads(index, weight, bytes);
  const int64_t blocks = (weight.in_features + kBlock - 1) / kBlock;
  const Segments segments = Segments::from_bounds(weight.segments, blocks);
  if (weight.kind == WeightKind::kNvfp4) {
    const nvfp4::Weight matrix = {
        bytes, weight.out_features, weight.in_features, weight.global_scale, segments, bias};
    if (weight.experts == 0) {
      nvfp4_[index] = matrix;
      return;
    }
    const bool quantized = weight.input_scale > 0;
    experts_[index] = moe::stack(matrix, bytes, weight.expert_scales,
                                 quantized ? std::optional(weight.input_scale) : std::nullopt);
    return;
  }
  const dense::Weight matrix = {bytes,
                                weight.out_features,
                                weight.in_features,
                                dense::dtype_from_name(weight.dtype),
                                segments,
                                bias};
  if (weight.experts == 0) {
    dense_[index] = matrix;
  } else {
    experts_[index] = moe::stack(matrix, bytes, weight.experts);
  }
}

void WeightTable::add_heads(int32_t index, const PlanWeight& weight,
                            std::span<const uint8_t> bytes) {
  const int64_t keys = weight.head_sizes[0], values = weight.head_sizes[1];
  const dense::DType dtype = dense::dtype_from_name(weight.dtype);
  const auto next = [&](int64_t out_features, int64_t in_features) {
    const int64_t size = dense::packed_size(out_features, in_features, dtype);
    const auto packed = bytes.first(std::min<size_t>(size, bytes.size()));
    bytes = bytes.subspan(packed.size());
    return dense::Weight{packed, out_features, in_features, dtype,
                         Segments::even((in_features + kBlock - 1) / kBlock)};
  };
  for (int64_t head = 0; head < weight.out_features / (keys + values); ++head) {
    head_keys_[index].push_back(next(weight.in_features, keys));
    head_values_[index].push_back(next(values, weight.in_features));
  }
}

NetworkRunner::NetworkRunner(const Plan& plan, const PlanNetwork& network,
                             const WeightTable& weights, const PagedCaches& caches,
                             BranchStates& branches, Parallel& parallel, Isa isa,
                             Collectives* collectives)
    : plan_(plan),
      network_(network),
      weights_(weights),
      caches_(caches),
      branches_(branches),
      parallel_(parallel),
      isa_(isa),
      ranks_(collectives),
      buffers_(network.buffers.size()),
      angles_(plan.ropes.size()),
      stages_(make_stages(network, plan.weights)) {}

void NetworkRunner::prepare(int64_t num_rows, int64_t num_outputs) {
  num_rows_ = num_rows;
  num_outputs_ = num_outputs;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const PlanBuffer& buffer = network_.buffers[i];
    const auto size =
        static_cast<size_t>((buffer.per_output ? num_outputs : num_rows) * buffer.width);
    if (buffers_[i].size() < size) buffers_[i].resize(size);
  }
}

Matrix NetworkRunner::tensor(int32_t index) const {
  const PlanTensor& tensor = network_.tensors[index];
  const bool per_output = network_.buffers[tensor.buffer].per_output;
  // Buffers belong to the runner; a const runner still hands out writable rows to its ops.
  float* const data = const_cast<float*>(buffers_[tensor.buffer].data());
  return {data + tensor.offset, per_output ? num_outputs_ : num_rows_, tensor.width, tensor.stride};
}

void NetworkRunner::run(const StepRows& rows, int32_t top_k, const Observer& observer) {
  for (auto& angles : angles_) angles.clear();
  prepared_ = false;
  for (const Stage& stage : stages_) {
    if (stage.by_rows && !observer) {
      run_stage(stage, rows);
      continue;
    }
    for (int32_t i = stage.first; i < stage.end(); ++i) {
      const PlanOp& op = network_.ops[i];
      run_op(op, rows, top_k);
      if (observer) observer(op);
    }
  }
}

void NetworkRunner::run_stage(const Stage& stage, const StepRows& rows) {
  const std::span ops(network_.ops);
  const auto these = ops.subspan(stage.first, stage.count);
  for (const PlanOp& op : these) make_angles(op, rows);
  Matrix x;
  if (stage.prepares) {
    const PlanOp& linear = ops[stage.end()];
    x = tensor(linear.inputs[0]);
    prepare_input(linear, x);
  }
  constexpr int64_t kTaskFloats = 2048;  // worth another thread
  const int64_t count = stage.per_output ? num_outputs_ : num_rows_;
  const int64_t grain = std::max<int64_t>(1, kTaskFloats / std::max<int64_t>(1, stage.width));
  parallel_.parallel_for(count, grain, [&](int64_t begin, int64_t end) {
    for (const PlanOp& op : these) run_rows(op, rows, begin, end);
    if (stage.prepares) nvfp4_input_.set_rows(x.data, x.stride, begin, end, isa_);
  });
  prepared_ = stage.prepares;
}

// The rows [begin, end) of an op that is_row_local.
void NetworkRunner::run_rows(const PlanOp& op, const StepRows& rows, int64_t begin, int64_t end) {
  const auto part = [&](int32_t index) { return tensor(index).slice(begin, end); };
  switch (op.kind) {
    case OpKind::kAdd:
      return add(part(op.inputs[0]), part(op.inputs[1]), part(op.outputs[0]));
    case OpKind::kConcat: {
      std::vector<Matrix> parts;
      for (const int32_t input : op.inputs) parts.push_back(part(input));
      return concat(parts, op.heads, part(op.outputs[0]));
    }
    case OpKind::kKvAppend: {
      const Matrix k = tensor(op.inputs[0]), v = tensor(op.inputs[1]);
      return attention::append(caches_.kv[op.state], rows.segments, {k.data, k.stride},
                               {v.data, v.stride}, begin, end, isa_);
    }
    case OpKind::kLayerNorm:
      return layer_norm(part(op.inputs[0]), weights_.vector(op.weight), op.heads, op.eps,
                        part(op.outputs[0]));
    case OpKind::kRmsNorm:
      return rms_norm(part(op.inputs[0]), weights_.vector(op.weight), op.heads, op.eps,
                      part(op.outputs[0]));
    case OpKind::kRotaryEmbedding: {
      const PlanRope& rope = plan_.ropes[op.rope];
      const double* const angles = angles_[op.rope].data() + begin * 2 * rope.inv_freq.size();
      return rotary_embedding(part(op.inputs[0]), angles, rope, op.heads, part(op.outputs[0]));
    }
    case OpKind::kScale:
      return scale(part(op.inputs[0]), weights_.vector(op.weight), op.heads, part(op.outputs[0]));
    case OpKind::kSigmoidMul:
      return sigmoid_mul(part(op.inputs[0]), part(op.inputs[1]), part(op.outputs[0]));
    case OpKind::kSiluMul:
      return silu_mul(part(op.inputs[0]), part(op.inputs[1]), part(op.outputs[0]), isa_);
    default: {  // kSplitHeads
      std::vector<Matrix> parts;
      for (const int32_t output : op.outputs) parts.push_back(part(output));
      return split_heads(part(op.inputs[0]), op.heads, parts);
    }
  }
}

void NetworkRunner::run_op(const PlanOp& op, const StepRows& rows, int32_t top_k) {
  if (is_row_local(op.kind)) {
    make_angles(op, rows);
    return run_rows(op, rows, 0, tensor(op.inputs[0]).rows);
  }
  switch (op.kind) {
    case OpKind::kAllGather:
      ranks_.gather_columns(tensor(op.inputs[0]), op.rank_columns, tensor(op.outputs[0]));
      break;
    case OpKind::kArgmax:
      outputs_.argmax.resize(num_outputs_);
      argmax(tensor(op.inputs[0]), op.name, outputs_.argmax.data(), parallel_);
      break;
    case OpKind::kCausalConv:
      branches_.causal_conv(op.state, weights_.taps(op.weight), tensor(op.inputs[0]),
                            tensor(op.outputs[0]), parallel_, isa_);
      break;
    case OpKind::kEmbedding:
      embedding(op, rows);
      break;
    case OpKind::kExpertsDown:
      experts_down(op);
      break;
    case OpKind::kExpertsLinear:
      experts_linear(op);
      break;
    case OpKind::kExpertsScale:
      experts_scale(op);
      break;
    case OpKind::kExpertsUp:
      experts_up(op);
      break;
    case OpKind::kGatedDeltaNet:
      gated_delta_net(op);
      break;
    case OpKind::kGatherRows:
      gather_rows(op, rows);
      break;
    case OpKind::kHeadKeys:
      head_linear(op, weights_.head_keys(op.weight));
      break;
    case OpKind::kHeadValues:
      head_linear(op, weights_.head_values(op.weight));
      break;
    case OpKind::kIndexSelect:
      index_select(op, rows);
      break;
    case OpKind::kLatentAppend: {
      const Matrix x = tensor(op.inputs[0]);
      latent::append(caches_.latents[op.state], rows.segments, x.data, x.stride);
      break;
    }
    case OpKind::kLatentAttention:
      latent_attention(op, rows);
      break;
    case OpKind::kLinear:
      linear(op);
      break;
    case OpKind::kRoute:
      route(op);
      break;
    case OpKind::kTopKLogProbs:
      top_k_log_probs(op, top_k);
      break;
    case OpKind::kTreeAttention:
      tree_attention(op, rows);
      break;
    default:  // row-local
      break;
  }
}

void NetworkRunner::linear(const PlanOp& op) {
  const Matrix x = tensor(op.inputs[0]), y = tensor(op.outputs[0]);
  const PlanWeight& weight = plan_.weights[op.weight];
  LinearOutput output{y.data, y.stride};
  if (op.row_parallel) {
    const auto segments = static_cast<int32_t>(weight.segments.size()) - 1;
    output = ranks_.segment_sums(x.rows, segments, y.width);
  }
  if (weight.kind == WeightKind::kDense) {
    const dense::Weight& packed = weights_.dense(op.weight);
    dense_input_.assign(x.data, x.rows, x.width, x.stride);
    dense::linear(packed, dense_input_, output, parallel_, isa_);
    if (op.row_parallel) ranks_.add_segments(1.0f, packed.bias, y, parallel_);
    return;
  }
  if (!std::exchange(prepared_, false)) {
    prepare_input(op, x);
    nvfp4_input_.set_all(x.data, x.stride, parallel_, isa_);
  }
  const nvfp4::Weight& packed = weights_.nvfp4(op.weight);
  nvfp4::linear(packed, nvfp4_input_, output, parallel_, isa_);
  if (!op.row_parallel) return;
  const float scale = nvfp4::output_scale(packed.global_scale, nvfp4_input_.input_scale());
  ranks_.add_segments(scale, packed.bias, y, parallel_);
}

// Makes room for the rows x of an NVFP4 linear's input.
void NetworkRunner::prepare_input(const PlanOp& op, const Matrix& x) {
  const float scale = plan_.weights[op.weight].input_scale;
  nvfp4_input_.prepare(x.rows, x.width, scale > 0 ? std::optional(scale) : std::nullopt);
}

void NetworkRunner::route(const PlanOp& op) {
  const Matrix logits = tensor(op.inputs[0]), weights = tensor(op.outputs[0]);
  const float* const bias = op.weight < 0 ? nullptr : weights_.vector(op.weight);
  moe::route(plan_.routings[op.routing], {logits.data, logits.stride}, logits.rows, bias,
             weights.data, weights.stride, parallel_);
}

void NetworkRunner::experts_scale(const PlanOp& op) {
  const Matrix x = tensor(op.inputs[0]), weights = tensor(op.inputs[1]), y = tensor(op.outputs[0]);
  moe::scale({{x.data, x.stride}, x.width == y.width}, {weights.data, weights.stride}, x.rows,
             weights.width, op.heads, weights_.vector(op.weight), y.width / op.heads, y.data,
             parallel_);
}

namespace {

// x, or a row of it for every slot.
moe::SlotRows slot_rows(const Matrix& x, int64_t in_features) {
  const bool in_slots = x.width > in_features;
  return {{x.data, in_slots ? in_features : x.stride}, in_slots};
}

}  // namespace

void NetworkRunner::experts_linear(const PlanOp& op) {
  const Matrix x = tensor(op.inputs[0]), weights = tensor(op.inputs[1]), y = tensor(op.outputs[0]);
  const moe::Experts& experts = weights_.experts(op.weight);
  const int64_t rows = x.rows * op.heads, width = y.width / op.heads;
  LinearOutput output{y.data, width};
  if (op.row_parallel) output = ranks_.segment_sums(rows, experts.segments().count, width);
  expert_rows_.linear(experts, slot_rows(x, experts.in_features()), {weights.data, weights.stride},
                      x.rows, op.heads, output, parallel_, isa_);
  if (op.row_parallel) ranks_.add_segments(1.0f, nullptr, {y.data, rows, width, width}, parallel_);
}

void NetworkRunner::experts_up(const PlanOp& op) {
  const Matrix x = tensor(op.inputs[0]), weights = tensor(op.inputs[1]);
  const moe::Experts& experts = weights_.experts(op.weight);
  const float* const added = op.inputs.size() > 2 ? tensor(op.inputs[2]).data : nullptr;
  expert_rows_.up(experts, slot_rows(x, experts.in_features()), {weights.data, weights.stride},
                  x.rows, op.heads, added, tensor(op.outputs[0]).data, parallel_, isa_);
}

void NetworkRunner::experts_down(const PlanOp& op) {
  const Matrix h = tensor(op.inputs[0]), weights = tensor(op.inputs[1]);
  const Matrix y = tensor(op.outputs[0]);
  const moe::Experts& experts = weights_.experts(op.weight);
  LinearOutput output{y.data, y.stride};
  if (op.row_parallel) {
    output = ranks_.segment_sums(h.rows, experts.segments().count, y.width);
  }
  expert_rows_.down(experts, h.data, {weights.data, weights.stride}, h.rows, op.heads, output,
                    parallel_, isa_);
  // Scales are in the sums already: they differ from expert to expert.
  if (op.row_parallel) ranks_.add_segments(1.0f, nullptr, y, parallel_);
}

void NetworkRunner::embedding(const PlanOp& op, const StepRows& rows) {
  const Matrix y = tensor(op.outputs[0]);
  const dense::Weight& table = weights_.dense(op.weight);
  for (int64_t r = 0; r < y.rows; ++r) dense::unpack_row(table, rows.token_ids[r], y.row(r));
}

void NetworkRunner::tree_attention(const PlanOp& op, const StepRows& rows) {
  const Matrix q = tensor(op.inputs[0]), y = tensor(op.outputs[0]);
  attention::Attention call;
  call.cache = caches_.kv[op.state];
  call.segments = rows.segments;
  call.visibility = op.causal_mask ? &rows.causal_visibility : &rows.visibility;
  call.positions = rows.positions;
  call.q = {q.data, q.stride};
  call.query_heads = op.heads;
  call.scale = op.scale;
  call.window = op.window;
  call.output = y.data;
  call.output_stride = y.stride;
  attention::attend(call, parallel_, isa_);
}

void NetworkRunner::head_linear(const PlanOp& op, const std::vector<dense::Weight>& matrices) {
  const Matrix x = tensor(op.inputs[0]), y = tensor(op.outputs[0]);
  for (size_t head = 0; head < matrices.size(); ++head) {
    const dense::Weight& matrix = matrices[head];
    const auto at = static_cast<int64_t>(head);
    dense_input_.assign(x.data + at * matrix.in_features, x.rows, matrix.in_features, x.stride);
    dense::linear(matrix, dense_input_, {y.data + at * matrix.out_features, y.stride}, parallel_,
                  isa_);
  }
}

void NetworkRunner::index_select(const PlanOp& op, const StepRows& rows) {
  const Matrix q = tensor(op.inputs[0]), weights = tensor(op.inputs[1]);
  const Matrix y = tensor(op.outputs[0]);
  selection_.resize(y.rows * y.width);
  indexer::Index call;
  call.keys = caches_.latents[op.state];
  call.segments = rows.segments;
  call.visibility = &rows.visibility;
  call.q = {q.data, q.stride};
  call.weights = {weights.data, weights.stride};
  call.heads = op.heads;
  call.top_k = y.width;
  indexer::select(call, op.name, selection_, parallel_, isa_);
  for (int64_t r = 0; r < y.rows; ++r) {
    std::memcpy(y.row(r), selection_.data() + r * y.width, y.width * sizeof(float));
  }
}

void NetworkRunner::latent_attention(const PlanOp& op, const StepRows& rows) {
  const Matrix q = tensor(op.inputs[0]), y = tensor(op.outputs[0]);
  mla::Attention call;
  if (op.inputs.size() > 1) {
    const Matrix chosen = tensor(op.inputs[1]);
    selection_.resize(chosen.rows * chosen.width);
    for (int64_t r = 0; r < chosen.rows; ++r) {
      std::memcpy(selection_.data() + r * chosen.width, chosen.row(r),
                  chosen.width * sizeof(float));
    }
    call.selection = selection_;
    call.top_k = chosen.width;
  }
  call.cache = caches_.latents[op.state];
  call.segments = rows.segments;
  call.visibility = &rows.visibility;
  call.q = {q.data, q.stride};
  call.heads = op.heads;
  call.value_dim = y.width / op.heads;
  call.scale = op.scale;
  call.output = y.data;
  call.output_stride = y.stride;
  mla::attend(call, parallel_, isa_);
}

void NetworkRunner::gated_delta_net(const PlanOp& op) {
  const auto rows = [&](size_t input) {
    const Matrix x = tensor(op.inputs[input]);
    return gated_delta_net::Rows{x.data, x.stride};
  };
  const gated_delta_net::Operands operands{rows(0), rows(1), rows(2),
                                           rows(3), rows(4), weights_.vector(op.weight)};
  branches_.gated_delta_net(op.state, op.heads, operands, tensor(op.outputs[0]), parallel_);
}

void NetworkRunner::make_angles(const PlanOp& op, const StepRows& rows) {
  if (op.kind != OpKind::kRotaryEmbedding) return;
  const PlanRope& rope = plan_.ropes[op.rope];
  std::vector<double>& angles = angles_[op.rope];
  if (!angles.empty()) return;  // the same for every layer of the step
  angles.resize(2 * rope.inv_freq.size() * num_rows_);
  rotary_angles(rows.positions, rope, angles.data());
}

void NetworkRunner::gather_rows(const PlanOp& op, const StepRows& rows) {
  const Matrix x = tensor(op.inputs[0]), y = tensor(op.outputs[0]);
  for (int64_t r = 0; r < y.rows; ++r) {
    std::memcpy(y.row(r), x.row(rows.output_rows[r]), y.width * sizeof(float));
  }
}

void NetworkRunner::top_k_log_probs(const PlanOp& op, int32_t top_k) {
  const Matrix logits = tensor(op.inputs[0]);
  const auto size = static_cast<size_t>(logits.rows) * top_k;
  outputs_.log_probs.resize(size);
  outputs_.token_ids.resize(size);
  ddtree::top_k_log_probs({logits.data, static_cast<size_t>(logits.rows * logits.width)},
                          static_cast<int32_t>(logits.rows), static_cast<int32_t>(logits.width),
                          top_k, parallel_.num_threads(), outputs_.log_probs, outputs_.token_ids);
  if (op.weight < 0) return;
  const float* const offsets = weights_.vector(op.weight);
  for (int32_t& id : outputs_.token_ids) id += static_cast<int32_t>(offsets[id]);
}

}  // namespace trtree::cpu
