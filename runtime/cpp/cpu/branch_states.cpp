#include "runtime/cpp/cpu/branch_states.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace trtree::cpu {

BranchStates::BranchStates(const Plan& plan, int32_t slots)
    : plan_(plan), states_(plan.states.size()) {
  for (size_t i = 0; i < plan.states.size(); ++i) {
    const PlanState& state = plan.states[i];
    if (state.paged()) continue;
    any_ = true;
    int64_t floats = slots * state.heads * state.head_dim;
    if (state.kind == StateKind::kRecurrent) floats *= state.value_dim;
    states_[i].committed.reset(static_cast<float*>(std::calloc(floats, sizeof(float))));
    if (!states_[i].committed) {
      throw std::runtime_error("no memory for " + std::to_string(floats * 4) +
                               " bytes of recurrent state");
    }
  }
}

void BranchStates::begin(const RowBatch& batch) {
  segments_.clear();
  orders_.clear();
  for (const Segment& segment : batch.segments) {
    const auto parents = std::span(batch.parents).subspan(segment.first_row, segment.num_rows);
    segments_.push_back({segment.first_row, segment.num_rows, segment.sequence.slot,
                         segment.sequence.committed_length == 0, parents});
    orders_.emplace_back(parents);
  }
}

void BranchStates::causal_conv(int32_t state, const float* weight, const Matrix& x, const Matrix& y,
                               Parallel& parallel, Isa isa) {
  State& of = states_[state];
  causal_conv::run(conv_shape(state), weight, of.committed.get(), segments_, {x.data, x.stride},
                   {y.data, y.stride}, parallel, isa);
  of.inputs.resize(x.rows * x.width);
  for (int64_t r = 0; r < x.rows; ++r) {
    std::copy_n(x.row(r), x.width, of.inputs.data() + r * x.width);
  }
}

void BranchStates::gated_delta_net(int32_t state, int64_t key_heads,
                                   const gated_delta_net::Operands& operands, const Matrix& y,
                                   Parallel& parallel) {
  State& of = states_[state];
  of.key_heads = key_heads;
  gated_delta_net::run(delta_shape(state), operands, of.committed.get(), segments_, orders_,
                       of.updates, y.data, y.stride, parallel);
}

void BranchStates::commit(size_t segment, std::span<const int32_t> rows) {
  for (size_t i = 0; i < states_.size(); ++i) {
    State& of = states_[i];
    const auto index = static_cast<int32_t>(i);
    if (plan_.states[i].kind == StateKind::kConv) {
      const causal_conv::Shape shape = conv_shape(index);
      causal_conv::commit(shape, of.committed.get(), segments_[segment], rows,
                          {of.inputs.data(), shape.channels});
    } else if (plan_.states[i].kind == StateKind::kRecurrent) {
      gated_delta_net::commit(delta_shape(index), of.committed.get(), segments_[segment], rows,
                              of.updates);
    }
  }
}

causal_conv::Shape BranchStates::conv_shape(int32_t state) const {
  return {plan_.states[state].head_dim, plan_.states[state].heads};
}

gated_delta_net::Shape BranchStates::delta_shape(int32_t state) const {
  const PlanState& of = plan_.states[state];
  return {states_[state].key_heads, of.heads, of.head_dim, of.value_dim};
}

}  // namespace trtree::cpu
