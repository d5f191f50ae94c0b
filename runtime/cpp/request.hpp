// What users ask of the executor and what it answers.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace trtree {

enum class DecodingMode { kPlain, kChain, kTree };
enum class TreeKind { kDynamic, kStatic };
// How large a request's tree is in each round; see tree_policy.hpp.
enum class BudgetPolicy { kFixed, kLoad, kAdaptive };
enum class FinishReason { kNotFinished, kStopToken, kLength, kCancelled };

// How the target's choice is made at each row, in this order: logit bias, penalties,
// temperature, top-k, top-p, min-p, one draw. See sampler.hpp.
struct SamplingConfig {
  float temperature = 0.0f;                           // 0: the largest logit, ties to the lower id
  int32_t top_k = 0;                                  // 0: all tokens
  float top_p = 1.0f;                                 // least probability mass kept
  float min_p = 0.0f;                                 // of the most probable token's probability
  float repetition_penalty = 1.0f;                    // of tokens in the prompt or the output
  float presence_penalty = 0.0f;                      // of tokens in the output
  float frequency_penalty = 0.0f;                     // for each time a token is in the output
  std::vector<std::pair<int32_t, float>> logit_bias;  // token id, added to its logit
  uint64_t seed = 0;  // with a token's index in the sequence, all that draws depend on

  bool operator==(const SamplingConfig&) const = default;
  // Whether the choice may differ from the largest logit as the network gives it.
  bool needs_logits() const {
    return temperature > 0.0f || repetition_penalty != 1.0f || presence_penalty != 0.0f ||
           frequency_penalty != 0.0f || !logit_bias.empty();
  }
};

// Log-probs under the target's own distribution, before any of SamplingConfig.
struct OutputConfig {
  int32_t log_probs = -1;         // alternatives per output token; -1: no log-probs
  int32_t prompt_log_probs = -1;  // the same for the prompt's tokens
};

struct SpeculativeConfig {
  DecodingMode mode = DecodingMode::kTree;
  TreeKind tree = TreeKind::kDynamic;
  int32_t tree_budget = 16;  // nodes besides the root; the most, where a policy chooses
  int32_t top_k = 0;         // ranks per depth; 0: as many as the budget can use
  BudgetPolicy policy = BudgetPolicy::kFixed;
  bool chain_seed = false;  // the top-1 chain first, then best-first on its siblings
};

struct Request {
  std::vector<int32_t> prompt_token_ids;
  int32_t max_tokens = 128;
  std::vector<int32_t> stop_token_ids;  // ends the output, and is part of it
  SamplingConfig sampling;
  SpeculativeConfig speculative;
  OutputConfig output;
};

struct RequestStatistics {
  int32_t prefill_forwards = 0;  // target passes over prompt rows
  int32_t verify_forwards = 0;   // target passes that decode: one per round
  int32_t drafted_tokens = 0;    // tree nodes besides roots
  int32_t accepted_tokens = 0;   // of those, nodes on accepted paths
  int32_t decoded_tokens = 0;    // tokens emitted by verify passes
  int32_t cached_tokens = 0;     // prompt tokens taken from the prefix cache
  int32_t preemptions = 0;       // times its pages were taken away and recomputed
  double queue_seconds = 0.0;    // from enqueue_request to the first admission
  // Sibling branches disturbed each other's state (allow_unsafe_tree_state).
  bool inexact_tree_state = false;

  int32_t target_forwards() const { return prefill_forwards + verify_forwards; }
  // Tokens per verify pass, the root's own choice included; 0 before the first.
  double acceptance_length() const {
    return verify_forwards == 0 ? 0.0 : static_cast<double>(decoded_tokens) / verify_forwards;
  }
};

// A token's log-prob, its rank (from 0) and the most probable alternatives.
struct TokenLogProbs {
  float log_prob = 0.0f;
  int32_t rank = 0;
  std::vector<std::pair<int32_t, float>> top;  // token id, log-prob; decreasing, ties by id
};

struct Response {
  int64_t request_id = 0;
  std::vector<int32_t> token_ids = {};  // new since the last response
  FinishReason finish_reason = FinishReason::kNotFinished;
  RequestStatistics statistics = {};  // so far
  // One for each of token_ids where the request asked for them.
  std::vector<TokenLogProbs> log_probs = {};
  // With the first response, one for each prompt token but the first, which follows nothing.
  std::vector<TokenLogProbs> prompt_log_probs = {};

  bool finished() const { return finish_reason != FinishReason::kNotFinished; }
};

// One request's part in one round, for traces.
struct RoundRecord {
  int64_t round = 0;  // counts target passes
  int64_t request_id = 0;
  bool prefill = false;
  int32_t committed_length = 0;    // before the round
  std::vector<int32_t> token_ids;  // rows: a prompt chunk, or the root and its tree
  std::vector<int32_t> parents;    // of each row, -1 the root's; empty for a chunk
  std::vector<int32_t> accepted;   // rows
  int32_t emitted_tokens = 0;
  bool extends_drafter = false;  // the accepted rows are in the drafter's context too
  int32_t tree_budget = 0;       // the policy's choice
  double queue_seconds = 0.0;    // from enqueue_request to the first admission
  // Of the whole round, shared by its requests.
  double draft_seconds = 0.0;
  double step_seconds = 0.0;
  double accept_seconds = 0.0;  // sampling, the walk and the commit
  int32_t step_rows = 0;
  int32_t step_requests = 0;
};

}  // namespace trtree
