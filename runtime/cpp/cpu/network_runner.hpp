// Runs one network of a plan over the rows of a step.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "plugins/cpu_isa.hpp"
#include "plugins/dense_linear/dense_linear.hpp"
#include "plugins/latent_cache.hpp"
#include "plugins/mla_attention/cpu.hpp"
#include "plugins/moe/moe.hpp"
#include "plugins/nvfp4_linear/nvfp4_linear.hpp"
#include "plugins/sparse_indexer/cpu.hpp"
#include "plugins/tree_attention/cpu.hpp"
#include "runtime/cpp/cpu/branch_states.hpp"
#include "runtime/cpp/cpu/mapped_file.hpp"
#include "runtime/cpp/cpu/plan.hpp"
#include "runtime/cpp/cpu/rank_ops.hpp"
#include "runtime/cpp/cpu/row_ops.hpp"
#include "runtime/cpp/cpu/row_stages.hpp"

namespace trtree::cpu {

// A plan's weights, memory-mapped; views into them are made once.
class WeightTable {
 public:
  // Throws std::runtime_error if a file is missing or shorter than the plan says.
  explicit WeightTable(const Plan& plan);

  const nvfp4::Weight& nvfp4(int32_t index) const { return nvfp4_.at(index); }
  const dense::Weight& dense(int32_t index) const { return dense_.at(index); }
  const moe::Experts& experts(int32_t index) const { return experts_.at(index); }
  // Of every head the matrix of its keys, and of its values.
  const std::vector<dense::Weight>& head_keys(int32_t index) const { return head_keys_.at(index); }
  const std::vector<dense::Weight>& head_values(int32_t index) const {
    return head_values_.at(index);
  }
  const float* vector(int32_t index) const { return vectors_.at(index); }
  // A convolution's vector [channels, kernel] as [kernel, channels].
  const float* taps(int32_t index) const { return taps_.at(index).data(); }

 private:
  void add_taps(const Plan& plan);
  void add_matrix(int32_t index, const PlanWeight& weight, std::span<const uint8_t> bytes,
                  const float* bias);
  void add_heads(int32_t index, const PlanWeight& weight, std::span<const uint8_t> bytes);

  std::map<std::string, MappedFile> files_;
  std::map<int32_t, nvfp4::Weight> nvfp4_;
  std::map<int32_t, dense::Weight> dense_;
  std::map<int32_t, moe::Experts> experts_;
  std::map<int32_t, std::vector<dense::Weight>> head_keys_, head_values_;
  std::map<int32_t, const float*> vectors_;
  std::map<int32_t, std::vector<float>> taps_;
};

// What the rows of a step are, made once and read by every layer.
struct StepRows {
  std::vector<attention::Segment> segments;
  std::vector<int32_t> token_ids;    // [rows]; empty for drafter_context
  std::vector<int32_t> positions;    // [rows]
  std::vector<int32_t> output_rows;  // [outputs]
  attention::Visibility visibility;
  attention::Visibility causal_visibility;  // layers of a drafter's block that are causal

  int64_t num_rows() const { return static_cast<int64_t>(positions.size()); }
  int64_t num_outputs() const { return static_cast<int64_t>(output_rows.size()); }
};

struct StepOutputs {
  std::vector<int32_t> argmax;     // [outputs]
  std::vector<float> log_probs;    // [outputs, top_k]
  std::vector<int32_t> token_ids;  // [outputs, top_k]
};

// Pages of all states, by state index; those of another kind are empty.
struct PagedCaches {
  std::vector<attention::PagedKv> kv;
  std::vector<latent::Cache> latents;
};

class NetworkRunner {
 public:
  // All references must outlive the runner. branches: where rows
  // continue their parents' state. collectives: null on one rank.
  NetworkRunner(const Plan& plan, const PlanNetwork& network, const WeightTable& weights,
                const PagedCaches& caches, BranchStates& branches, Parallel& parallel, Isa isa,
                Collectives* collectives = nullptr);

  // Makes room for the step's rows; an input tensor may be filled after this.
  void prepare(int64_t num_rows, int64_t num_outputs);
  // Called after each op, while its inputs and outputs are whole.
  using Observer = std::function<void(const PlanOp& op)>;

  // Throws std::runtime_error where logits are NaN. top_k: ranks of top_k_log_probs.
  void run(const StepRows& rows, int32_t top_k, const Observer& observer = {});

  // A tensor of the last run, as the plan numbers it.
  Matrix tensor(int32_t index) const;
  const StepOutputs& outputs() const { return outputs_; }

 private:
  void run_op(const PlanOp& op, const StepRows& rows, int32_t top_k);
  void run_stage(const Stage& stage, const StepRows& rows);
  void run_rows(const PlanOp& op, const StepRows& rows, int64_t begin, int64_t end);
  void linear(const PlanOp& op);
  void prepare_input(const PlanOp& op, const Matrix& x);
  void route(const PlanOp& op);
  void experts_linear(const PlanOp& op);
  void experts_scale(const PlanOp& op);
  void experts_up(const PlanOp& op);
  void experts_down(const PlanOp& op);
  void embedding(const PlanOp& op, const StepRows& rows);
  void tree_attention(const PlanOp& op, const StepRows& rows);
  void make_angles(const PlanOp& op, const StepRows& rows);
  void head_linear(const PlanOp& op, const std::vector<dense::Weight>& matrices);
  void index_select(const PlanOp& op, const StepRows& rows);
  void latent_attention(const PlanOp& op, const StepRows& rows);
  void gated_delta_net(const PlanOp& op);
  void gather_rows(const PlanOp& op, const StepRows& rows);
  void top_k_log_probs(const PlanOp& op, int32_t top_k);

  const Plan& plan_;
  const PlanNetwork& network_;
  const WeightTable& weights_;
  const PagedCaches& caches_;
  BranchStates& branches_;
  Parallel& parallel_;
  const Isa isa_;
  RankOps ranks_;

  int64_t num_rows_ = 0;
  int64_t num_outputs_ = 0;
  std::vector<std::vector<float>> buffers_;
  std::vector<std::vector<double>> angles_;  // by rope, of this step; empty: not made yet
  const std::vector<Stage> stages_;
  nvfp4::Input nvfp4_input_;
  bool prepared_ = false;  // nvfp4_input_ holds the rows of the next linear already
  dense::Input dense_input_;
  moe::ExpertRows expert_rows_;
  std::vector<int32_t> selection_;  // as an op reads or writes it
  StepOutputs outputs_;
};

}  // namespace trtree::cpu
