// A request between its arrival and its last response.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "plugins/ddtree/ddtree.hpp"
#include "runtime/cpp/engine.hpp"
#include "runtime/cpp/kv_pages.hpp"
#include "runtime/cpp/request.hpp"
#include "runtime/cpp/sampler.hpp"
#include "runtime/cpp/snapshot_plan.hpp"

namespace trtree {

// Its tokens are the prompt followed by the output; the first committed_length of them are
// committed. While it decodes exactly one, the bonus token, is not. A pre-empted request
// keeps its tokens and commits them again.
struct ActiveRequest {
  using Clock = std::chrono::steady_clock;

  ActiveRequest(int64_t id, Request asked)
      : request_id(id), request(std::move(asked)), tokens(request.prompt_token_ids) {
    if (uses_counts(request.sampling)) counts = TokenCounts(request.prompt_token_ids);
  }

  const int64_t request_id;
  const Request request;
  std::vector<int32_t> tokens;
  int32_t committed_length = 0;
  int32_t slot = -1;  // of the engine; -1: waiting
  KvPages::Lease lease;
  SnapshotPlan snapshots;
  TokenCounts counts;  // of tokens, where penalties look at them
  RequestStatistics statistics;
  std::vector<TokenLogProbs> prompt_log_probs;  // until the first response
  Clock::time_point arrived = Clock::now();
  int32_t rounds_skipped = 0;  // since it last ran
  bool admitted = false;       // at some time

  // Whether the drafter's context follows every commit. Where that ended with drafter_length
  // tokens, the request cannot draft until it has run the others again.
  bool keeps_drafter = false;
  int32_t drafter_length = 0;
  int32_t probe_trees = 0;  // to draft although requests like it do not

  // This round's rows: a prompt chunk's first tokens, or a draft tree.
  int32_t chunk = 0;
  SpeculativeConfig drafting;  // what the policy makes of the request's own
  bool drafts = false;         // the policy lets it
  ddtree::Tree tree;

  int32_t num_tokens() const { return static_cast<int32_t>(tokens.size()); }
  int32_t num_prompt() const { return static_cast<int32_t>(request.prompt_token_ids.size()); }
  int32_t num_output() const { return num_tokens() - num_prompt(); }
  int32_t tokens_wanted() const { return request.max_tokens - num_output(); }
  // Tokens to commit before it decodes: all but the bonus token, once there is one.
  int32_t prefill_left() const {
    return num_tokens() - (num_output() > 0 ? 1 : 0) - committed_length;
  }
  bool prefilling() const { return prefill_left() > 0; }
  // Its last prompt row chooses the first output token.
  bool chooses_first() const { return num_output() == 0 && chunk == prefill_left(); }
  bool speculative() const { return request.speculative.mode != DecodingMode::kPlain; }
  bool adaptive() const {
    return speculative() && request.speculative.policy == BudgetPolicy::kAdaptive;
  }
  bool needs_logits() const {
    return request.sampling.needs_logits() || request.output.log_probs >= 0;
  }
  bool wants_prompt_log_probs() const {
    return request.output.prompt_log_probs >= 0 && num_output() == 0;
  }
  std::span<const int32_t> committed() const { return std::span(tokens).first(committed_length); }
  Sequence sequence() const { return {request_id, slot, committed_length, lease.pages}; }
};

}  // namespace trtree
