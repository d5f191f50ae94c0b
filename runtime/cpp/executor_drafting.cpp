// Which requests draft. Those that can keep the drafter's context up to date at every commit;
// an adaptive request does so only while drafting pays at the load there is. One whose context
// has lapsed decodes plainly until it has run its last tokens again: the hidden states that
// would extend the context are gone after a commit, and keeping them costs memory for every
// token of every request.
#include <algorithm>
#include <vector>

#include "runtime/cpp/drafting.hpp"
#include "runtime/cpp/executor.hpp"
#include "runtime/cpp/request_checks.hpp"

namespace trtree {

namespace {

using Phase = AdaptiveBudget::Phase;

// Rounds for which contexts are kept although drafting has ended: loads come and go.
constexpr int32_t kPatience = 16;
// Tokens that a request is expected to go on for, however short it is yet. Beyond that, it is
// expected to go on for as long as it has.
constexpr int32_t kLeastFuture = 32;

int32_t expected_tokens(const ActiveRequest& request) {
  return std::min(request.tokens_wanted(), std::max(request.num_output(), kLeastFuture));
}

}  // namespace

// Before requests are admitted: what adaptive ones do from now on.
void Executor::turn_drafting() {
  if (!adaptive_) return;
  const RoundLoad load = steady_load();
  if (load.requests == 0) return;
  const Phase before = phase_;
  phase_ = adaptive_->phase(load);
  if (phase_ == Phase::kPlain) {
    plain_rounds_ = before == Phase::kPlain ? plain_rounds_ + 1 : 0;
    if (plain_rounds_ >= kPatience) end_drafting();
    choose_probe(load);
  } else {
    begin_drafting(load);
  }
  requeue_preempted();
}

// The load with every adaptive request drafting, those that will be admitted now included, and
// without prompt chunks.
RoundLoad Executor::steady_load() const {
  RoundLoad load{.requests = 0};
  const auto add = [&](const ActiveRequest& request) {
    if (request.adaptive()) {
      ++load.requests;
      load.mean_context += request.num_tokens();
    } else {
      ++load.other_requests;
      load.other_rows += verify_rows(capabilities_, request.request.speculative);
    }
  };
  for (const auto& request : active_) add(*request);
  for (size_t i = 0; i < std::min(queue_.size(), free_slots_.size()); ++i) add(*queue_[i]);
  load.mean_context /= std::max(1, load.requests);
  load.max_nodes = capabilities_.max_num_rows - load.other_rows - load.requests;
  return load;
}

void Executor::end_drafting() {
  for (const auto& request : active_) {
    if (!request->adaptive() || !request->keeps_drafter || request->probe_trees > 0) continue;
    request->keeps_drafter = false;
    request->drafter_length = request->committed_length;
  }
}

// Requests whose context has lapsed run their last tokens again, where that is worth it.
void Executor::begin_drafting(const RoundLoad& load) {
  for (const auto& request : active_) request->probe_trees = 0;
  if (phase_ != Phase::kDrafting || !queue_.empty()) return;
  double saved = -1.0;  // known when first needed
  for (const auto& request : active_) {
    if (!request->adaptive() || request->keeps_drafter || !has_room_again(*request)) continue;
    if (saved < 0.0) saved = std::max(0.0, adaptive_->seconds_saved(load));
    const int32_t missing = missing_tokens(*request);
    if (expected_tokens(*request) * saved > adaptive_->rerun_seconds(load, missing)) {
      catch_up(*request);
    }
  }
}

// Whether a request that is being admitted keeps the drafter's context from its start.
bool Executor::admit_to_draft(ActiveRequest& request) {
  if (!request.speculative() || !request.adaptive()) return request.speculative();
  if (phase_ != Phase::kPlain || request.probe_trees > 0) return true;
  if (!may_probe(request)) return false;
  const RoundLoad load = steady_load();
  if (!adaptive_->probe_due(adaptive_->probe_seconds(load, 0, request.num_tokens()))) return false;
  request.probe_trees = AdaptiveBudget::kProbeTrees;
  adaptive_->begin_probe();
  return true;
}

// One request at a time probes, and only one that lives long enough.
bool Executor::may_probe(const ActiveRequest& request) const {
  return request.adaptive() && request.tokens_wanted() > AdaptiveBudget::kProbeTrees &&
         std::none_of(active_.begin(), active_.end(),
                      [](const auto& other) { return other->probe_trees > 0; });
}

// Where no request arrives that could probe, the one that has least to run again.
void Executor::choose_probe(const RoundLoad& load) {
  if (!queue_.empty()) return;
  ActiveRequest* nearest = nullptr;
  for (const auto& request : active_) {
    if (!may_probe(*request) || (!request->keeps_drafter && !has_room_again(*request))) continue;
    if (!nearest || missing_tokens(*request) < missing_tokens(*nearest)) nearest = request.get();
  }
  if (!nearest) return;
  const int32_t missing = missing_tokens(*nearest);
  if (!adaptive_->probe_due(adaptive_->probe_seconds(load, missing, missing))) return;
  nearest->probe_trees = AdaptiveBudget::kProbeTrees;
  adaptive_->begin_probe();
  if (missing > 0) catch_up(*nearest);
}

// Committed tokens that the drafter's context lacks and that cached pages cannot be relied on to
// give back: where state is recurrent, snapshots may all be further on than the context.
int32_t Executor::missing_tokens(const ActiveRequest& request) const {
  if (request.keeps_drafter) return 0;
  if (!statistics_.prefix_cache || capabilities_.recurrent_state) return request.committed_length;
  const int32_t pages = request.drafter_length / capabilities_.page_size;
  return request.committed_length - pages * capabilities_.page_size;
}

// Whether the request can be admitted again while what it holds may still be read by others.
bool Executor::has_room_again(const ActiveRequest& request) const {
  return pages_.num_available() >= pages_for(request.request, admission_tokens(request));
}

// Give back what the request holds, to be admitted again at once: with pages that have the
// drafter's keys and values, and its other tokens as a prompt.
void Executor::catch_up(ActiveRequest& request) {
  leave(request);
  ++statistics_.drafter_catch_ups;
}

// What each decoding request drafts in this round, by its policy.
void Executor::choose_drafting(std::span<ActiveRequest* const> requests) {
  const auto decoding = static_cast<int32_t>(std::count_if(
      requests.begin(), requests.end(), [](const auto* r) { return !r->prefilling(); }));
  const int32_t load_rows =
      config_.load_rows > 0 ? config_.load_rows : default_load_rows(capabilities_);
  for (ActiveRequest* request : requests) {
    request->drafting = request->request.speculative;
    request->drafts = request->keeps_drafter &&
                      (!request->adaptive() || phase_ != Phase::kPlain || request->probe_trees > 0);
    if (request->drafting.policy == BudgetPolicy::kLoad) {
      request->drafting = under_load(request->drafting, capabilities_, decoding, load_rows);
    }
  }
}

}  // namespace trtree
