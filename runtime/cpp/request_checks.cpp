#include "runtime/cpp/request_checks.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace trtree {

namespace {

using std::to_string;

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void check_tokens(const char* name, const std::vector<int32_t>& ids, int32_t vocab_size) {
  for (const int32_t id : ids) {
    if (id < 0 || id >= vocab_size) {
      refuse(std::string(name) + " holds " + to_string(id) + "; the vocabulary has " +
             to_string(vocab_size) + " entries");
    }
  }
}

void check_log_probs(const char* name, int32_t alternatives, int32_t vocab_size) {
  if (alternatives < -1 || alternatives > vocab_size) {
    refuse(std::string(name) + " " + to_string(alternatives) + "; from 0 to " +
           to_string(vocab_size) + " alternatives can be asked for, -1 asks for none");
  }
}

void check_speculation(const SpeculativeConfig& config, const Capabilities& capabilities,
                       const ExecutorConfig& executor) {
  if (config.mode == DecodingMode::kPlain) return;
  if (capabilities.block_size == 0) {
    refuse("mode chain and tree need a drafter; this engine was built without one: use mode plain");
  }
  if (config.policy == BudgetPolicy::kAdaptive && !executor.cost_model) {
    refuse(
        "policy adaptive needs the costs of this engine's steps on this machine; measure them "
        "with python -m trtree.runtime.calibrate");
  }
  if (config.mode == DecodingMode::kChain) return;
  if (config.tree == TreeKind::kStatic && config.policy == BudgetPolicy::kAdaptive) {
    refuse("policy adaptive cuts dynamic trees; the static tree is one size");
  }
  if (config.tree_budget < 0) {
    refuse("tree_budget " + to_string(config.tree_budget) + " is negative");
  }
  if (config.top_k < 0 || config.top_k > capabilities.max_top_k) {
    refuse("top_k " + to_string(config.top_k) + "; the engine offers at most " +
           to_string(capabilities.max_top_k));
  }
  if (config.tree == TreeKind::kStatic && executor.medusa_choices.empty()) {
    refuse("a static tree was asked for; the engine was built without one (--tree static)");
  }
  const auto static_nodes = static_cast<int32_t>(executor.medusa_choices.size());
  if (config.tree == TreeKind::kStatic && static_nodes > config.tree_budget) {
    refuse("tree_budget " + to_string(config.tree_budget) + " is below the static tree's " +
           to_string(static_nodes) + " nodes");
  }
  const int64_t rows = int64_t{1} + config.tree_budget;
  if (rows > capabilities.verify_width) {
    refuse("tree_budget " + to_string(config.tree_budget) + " needs a verify width of " +
           to_string(rows) + "; the engine was built for " + to_string(capabilities.verify_width));
  }
  if (capabilities.tree_state == TreeState::kInexact && !executor.allow_unsafe_tree_state) {
    refuse(
        "this engine's recurrent state cannot branch exactly, so draft trees are refused; "
        "use mode chain, or allow_unsafe_tree_state (serve.py --allow-unsafe-tree-state)");
  }
}

}  // namespace

void check_capabilities(const Capabilities& capabilities) {
  const auto at_least_one = [](const char* name, int32_t value) {
    if (value < 1) refuse(std::string("the engine declares ") + name + " " + to_string(value));
  };
  at_least_one("max_batch_size", capabilities.max_batch_size);
  at_least_one("max_num_rows", capabilities.max_num_rows);
  at_least_one("max_seq_len", capabilities.max_seq_len);
  at_least_one("verify_width", capabilities.verify_width);
  at_least_one("vocab_size", capabilities.vocab_size);
  if (capabilities.state_snapshots < 0) {
    refuse("the engine declares state_snapshots " + to_string(capabilities.state_snapshots));
  }
  if (capabilities.kv_layout == KvLayout::kPaged) {
    at_least_one("page_size", capabilities.page_size);
    at_least_one("num_pages", capabilities.num_pages);
  }
  if (capabilities.verify_width > capabilities.max_num_rows) {
    refuse("the engine declares verify_width " + to_string(capabilities.verify_width) +
           " above max_num_rows " + to_string(capabilities.max_num_rows));
  }
}

void check_request(const Request& request, const Capabilities& capabilities,
                   const ExecutorConfig& config) {
  if (request.prompt_token_ids.empty()) refuse("prompt_token_ids is empty");
  if (request.max_tokens < 1) {
    refuse("max_tokens must be at least 1, not " + to_string(request.max_tokens));
  }
  const auto prompt = static_cast<int64_t>(request.prompt_token_ids.size());
  if (prompt + request.max_tokens > capabilities.max_seq_len) {
    refuse("the prompt's " + to_string(prompt) + " tokens and max_tokens " +
           to_string(request.max_tokens) + " exceed the engine's max_seq_len " +
           to_string(capabilities.max_seq_len));
  }
  check_tokens("prompt_token_ids", request.prompt_token_ids, capabilities.vocab_size);
  check_tokens("stop_token_ids", request.stop_token_ids, capabilities.vocab_size);
  check_sampling(request.sampling, capabilities.vocab_size);
  check_log_probs("log_probs", request.output.log_probs, capabilities.vocab_size);
  check_log_probs("prompt_log_probs", request.output.prompt_log_probs, capabilities.vocab_size);
  check_speculation(request.speculative, capabilities, config);
}

void check_draft(const DraftResult& draft, size_t requests, int32_t top_k) {
  const size_t expected = requests * static_cast<size_t>(draft.depth) * draft.top_k;
  if (draft.top_k != top_k || draft.log_probs.size() != expected ||
      draft.token_ids.size() != expected) {
    throw std::runtime_error("the engine drafted " + to_string(draft.token_ids.size()) +
                             " candidates with top_k " + to_string(draft.top_k) + " for " +
                             to_string(requests) + " requests with top_k " + to_string(top_k));
  }
}

void check_step(const StepResult& result, const RowBatch& batch, int32_t vocab_size) {
  if (result.argmax.size() != batch.output_rows.size()) {
    throw std::runtime_error("the engine answered " + to_string(result.argmax.size()) +
                             " output rows, asked for " + to_string(batch.output_rows.size()));
  }
  const auto wanted = std::count(batch.needs_logits.begin(), batch.needs_logits.end(), 1);
  if (result.logits.size() != static_cast<size_t>(wanted) * vocab_size) {
    throw std::runtime_error("the engine answered " + to_string(result.logits.size()) +
                             " logits, asked for " + to_string(wanted) + " rows of " +
                             to_string(vocab_size));
  }
}

}  // namespace trtree
