#include "runtime/cpp/cpu/cpu_engine.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/cpp/cpu/plan_checks.hpp"
#include "runtime/cpp/engine_checks.hpp"

namespace trtree::cpu {

namespace {

attention::Segment attention_segment(const Sequence& sequence, int32_t first_row,
                                     int32_t num_rows) {
  return {first_row, num_rows, sequence.committed_length, sequence.pages};
}

attention::KvType kv_type(const PlanState& state) {
  return state.fp8() ? attention::KvType::kE4m3 : attention::KvType::kFloat32;
}

int64_t parts(const PlanState& state) { return state.kind == StateKind::kKv ? 2 : 1; }

}  // namespace

CpuEngine::CpuEngine(Plan plan, Capabilities capabilities, int32_t mask_token_id, int num_threads,
                     Isa isa, Collectives* collectives)
    : plan_(std::move(plan)),
      capabilities_(std::move(capabilities)),
      mask_token_id_(mask_token_id),
      threads_(num_threads),
      weights_((check_plan(plan_), check_ranks(plan_, collectives), plan_)),
      branches_(plan_, capabilities_.max_batch_size, capabilities_.state_snapshots) {
  const int64_t slots = static_cast<int64_t>(capabilities_.num_pages) * capabilities_.page_size;
  // Of a state's keys, values or latents. Vectors that cross cache lines would be read at half
  // the speed.
  const auto part_bytes = [slots](const PlanState& state) {
    if (!state.paged()) return int64_t{0};
    const int64_t size =
        slots * state.heads * state.head_dim * attention::item_bytes(kv_type(state));
    return (size + kPackedAlignment - 1) / kPackedAlignment * kPackedAlignment;
  };
  int64_t total = 0;
  for (const PlanState& state : plan_.states) total += parts(state) * part_bytes(state);
  size_t bytes = total + kPackedAlignment;
  pool_.reset(static_cast<std::byte*>(std::calloc(1, bytes)));
  if (!pool_) throw std::runtime_error("no memory for " + std::to_string(total) + " bytes of KV");
  void* start = pool_.get();
  auto* next = static_cast<std::byte*>(std::align(kPackedAlignment, total, start, bytes));
  for (const PlanState& state : plan_.states) {
    const int64_t size = part_bytes(state);
    caches_.kv.push_back({next, next + size, capabilities_.page_size, state.heads, state.head_dim,
                          kv_type(state), state.k_scale, state.v_scale});
    caches_.latents.push_back(
        {reinterpret_cast<float*>(next), capabilities_.page_size, state.head_dim});
    next += parts(state) * size;
  }
  for (const auto& [name, network] : plan_.networks) {
    runners_[name] = std::make_unique<NetworkRunner>(plan_, network, weights_, caches_, branches_,
                                                     threads_, isa, collectives);
  }
}

StepResult CpuEngine::step(const RowBatch& batch) {
  check_batch(batch, capabilities_);
  last_step_ = batch;
  StepRows rows;
  for (const Segment& segment : last_step_->segments) {
    rows.segments.push_back(
        attention_segment(segment.sequence, segment.first_row, segment.num_rows));
  }
  rows.token_ids = batch.token_ids;
  rows.positions = batch.positions;
  rows.output_rows = batch.output_rows;
  rows.visibility.assign(rows.segments, batch.packed_mask, batch.mask_words);

  if (branches_.any()) branches_.begin(*last_step_);

  NetworkRunner& target = runner("target");
  target.prepare(rows.num_rows(), rows.num_outputs());
  run("target", rows, 0);
  StepResult result{target.outputs().argmax, {}};
  const Matrix logits = target.tensor(plan_.networks.at("target").logits);
  for (int64_t r = 0; r < rows.num_outputs(); ++r) {
    if (!batch.needs_logits[r]) continue;
    result.logits.insert(result.logits.end(), logits.row(r), logits.row(r) + logits.width);
  }
  return result;
}

void CpuEngine::commit(const std::vector<Commit>& commits) {
  if (!last_step_) throw std::invalid_argument("commit without a step before it");
  check_commits(commits, *last_step_);
  check_saves(commits, capabilities_);
  threads_.parallel_for(static_cast<int64_t>(commits.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Segment& segment = segment_of(commits[i].sequence.request_id);
      const auto at = attention_segment(segment.sequence, segment.first_row, segment.num_rows);
      if (branches_.any())
        branches_.commit(&segment - last_step_->segments.data(), commits[i].rows, commits[i].saves);
      // A path without gaps is where it has to be already.
      if (commits[i].rows.empty() ||
          commits[i].rows.back() + 1 == static_cast<int32_t>(commits[i].rows.size())) {
        continue;
      }
      for (size_t s = 0; s < plan_.states.size(); ++s) {
        const PlanState& state = plan_.states[s];
        if (state.drafter) continue;
        if (state.kind == StateKind::kKv) attention::commit(caches_.kv[s], at, commits[i].rows);
        if (state.kind == StateKind::kLatent) {
          latent::commit(caches_.latents[s], at, commits[i].rows);
        }
      }
    }
  });
  extend_drafter(commits);
  last_step_.reset();
}

void CpuEngine::extend_drafter(const std::vector<Commit>& commits) {
  if (!runners_.contains("drafter_context")) return;
  StepRows rows;
  std::vector<int32_t> captured_rows;
  for (const Commit& commit : commits) {
    if (!commit.extend_drafter || commit.rows.empty()) continue;
    const Segment& segment = segment_of(commit.sequence.request_id);
    rows.segments.push_back(attention_segment(segment.sequence,
                                              static_cast<int32_t>(captured_rows.size()),
                                              static_cast<int32_t>(commit.rows.size())));
    for (const int32_t row : commit.rows) {
      captured_rows.push_back(segment.first_row + row);
      rows.positions.push_back(last_step_->positions[segment.first_row + row]);
    }
  }
  if (captured_rows.empty()) return;
  NetworkRunner& context = runner("drafter_context");
  context.prepare(rows.num_rows(), 0);
  const Matrix from = runner("target").tensor(plan_.networks.at("target").captured_output);
  const Matrix to = context.tensor(plan_.networks.at("drafter_context").captured_input);
  for (size_t i = 0; i < captured_rows.size(); ++i) {
    std::memcpy(to.row(static_cast<int64_t>(i)), from.row(captured_rows[i]),
                to.width * sizeof(float));
  }
  run("drafter_context", rows, 0);
}

DraftResult CpuEngine::draft(const std::vector<DraftRequest>& requests, int32_t top_k) {
  check_draft_requests(requests, top_k, capabilities_);
  const int32_t block = capabilities_.block_size;
  StepRows rows;
  for (const DraftRequest& request : requests) {
    const auto first = static_cast<int32_t>(rows.num_rows());
    rows.segments.push_back(attention_segment(request.sequence, first, block));
    for (int32_t slot = 0; slot < block; ++slot) {
      rows.token_ids.push_back(slot == 0 ? request.bonus_token : mask_token_id_);
      rows.positions.push_back(request.sequence.committed_length + slot);
      if (slot > 0) rows.output_rows.push_back(first + slot);
    }
  }
  rows.visibility.assign_blocks(rows.segments, false);
  rows.causal_visibility.assign_blocks(rows.segments, true);
  NetworkRunner& drafter = runner("drafter_block");
  drafter.prepare(rows.num_rows(), rows.num_outputs());
  run("drafter_block", rows, top_k);
  return {block - 1, top_k, drafter.outputs().log_probs, drafter.outputs().token_ids};
}

void CpuEngine::load_state(int32_t snapshot, int32_t slot) {
  check_load(snapshot, slot, capabilities_);
  branches_.load(snapshot, slot);
}

void CpuEngine::run(const std::string& network, const StepRows& rows, int32_t top_k) {
  NetworkRunner& runs = runner(network);
  if (!observer_) return runs.run(rows, top_k);
  runs.run(rows, top_k, [&](const PlanOp& op) {
    std::vector<Matrix> inputs, outputs;
    for (const int32_t input : op.inputs) inputs.push_back(runs.tensor(input));
    for (const int32_t output : op.outputs) outputs.push_back(runs.tensor(output));
    observer_(network, op, inputs, outputs);
  });
}

const Segment& CpuEngine::segment_of(int64_t request_id) const {
  return *std::find_if(
      last_step_->segments.begin(), last_step_->segments.end(),
      [&](const Segment& segment) { return segment.sequence.request_id == request_id; });
}

}  // namespace trtree::cpu
