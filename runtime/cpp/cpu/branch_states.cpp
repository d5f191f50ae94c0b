#include "runtime/cpp/cpu/branch_states.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace trtree::cpu {

namespace {

float* zeros(int64_t floats) {
  auto* const memory = static_cast<float*>(std::calloc(floats, sizeof(float)));
  if (memory == nullptr && floats > 0) {
    throw std::runtime_error("no memory for " + std::to_string(floats * 4) +
                             " bytes of recurrent state");
  }
  return memory;
}

}  // namespace

BranchStates::BranchStates(const Plan& plan, int32_t slots, int32_t snapshots)
    : plan_(plan), states_(plan.states.size()) {
  for (size_t i = 0; i < plan.states.size(); ++i) {
    const PlanState& state = plan.states[i];
    if (state.paged()) continue;
    any_ = true;
    State& of = states_[i];
    of.size = state.heads * state.head_dim;
    if (state.kind == StateKind::kRecurrent) of.size *= state.value_dim;
    of.committed.reset(zeros(slots * of.size));
    of.saved.reset(zeros(snapshots * of.size));
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

void BranchStates::commit(size_t segment, std::span<const int32_t> rows,
                          std::span<const StateSave> saves) {
  for (size_t i = 0; i < states_.size(); ++i) {
    const State& of = states_[i];
    const auto index = static_cast<int32_t>(i);
    if (of.size == 0) continue;
    branch::Segment at = segments_[segment];
    int32_t done = 0;
    for (const StateSave& save : saves) {
      move(index, at, rows.subspan(done, save.rows - done));
      std::copy_n(of.committed.get() + at.slot * of.size, of.size,
                  of.saved.get() + save.snapshot * of.size);
      done = save.rows;
      at.fresh = false;
    }
    move(index, at, rows.subspan(done));
  }
}

// One state, along rows that follow the committed one.
void BranchStates::move(int32_t state, const branch::Segment& segment,
                        std::span<const int32_t> rows) {
  State& of = states_[state];
  if (plan_.states[state].kind == StateKind::kConv) {
    const causal_conv::Shape shape = conv_shape(state);
    causal_conv::commit(shape, of.committed.get(), segment, rows,
                        {of.inputs.data(), shape.channels});
  } else {
    gated_delta_net::commit(delta_shape(state), of.committed.get(), segment, rows, of.updates);
  }
}

void BranchStates::load(int32_t snapshot, int32_t slot) {
  for (const State& of : states_) {
    std::copy_n(of.saved.get() + snapshot * of.size, of.size, of.committed.get() + slot * of.size);
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
