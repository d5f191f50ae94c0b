// In-flight batching over an Engine: admits requests, drafts, verifies, commits.
// Knows nothing of layers, text or Python.
//
// Any thread may call any method. Rounds run in await_responses, one at a time; requests
// and cancellations wait in a mailbox and are taken up between rounds.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <vector>

#include "runtime/cpp/active_request.hpp"
#include "runtime/cpp/engine.hpp"
#include "runtime/cpp/kv_pages.hpp"
#include "runtime/cpp/request.hpp"
#include "runtime/cpp/tree_policy.hpp"

namespace trtree {

struct KvCacheConfig {
  // Keep pages of finished requests, and let later ones begin with the same tokens on them.
  // Only for engines with paged KV.
  bool enable_block_reuse = true;
  // Where requests have recurrent state, which pages do not hold: tokens between snapshots of
  // it. Fewer, and less of a prefix is run again; each is a copy of the state.
  int32_t snapshot_interval = 32;
};

enum class CapacitySchedulerPolicy {
  kMaxUtilization,     // admit early; when pages run out, pre-empt the youngest request
  kGuaranteedNoEvict,  // admit a request only with all the pages it can ever need
};

struct SchedulerConfig {
  CapacitySchedulerPolicy capacity_scheduler_policy = CapacitySchedulerPolicy::kMaxUtilization;
};

struct ExecutorConfig {
  // Rank paths of the engine's static tree, breadth-first; empty: it has none.
  std::vector<std::vector<int32_t>> medusa_choices;
  // Verify branching trees even where sibling branches disturb each other's state.
  bool allow_unsafe_tree_state = false;
  KvCacheConfig kv_cache_config = {};
  SchedulerConfig scheduler_config = {};
  int32_t max_queue_size = 0;  // requests that wait; 0: any number
  int32_t load_rows = 0;       // of a step, for BudgetPolicy::kLoad; 0: default_load_rows()
  std::optional<CostModel> cost_model = std::nullopt;  // for BudgetPolicy::kAdaptive
  bool record_rounds = false;                          // for take_rounds()
};

// Counts since the executor began, but for those "now".
struct ExecutorStatistics {
  int64_t target_forwards = 0;
  int64_t drafter_forwards = 0;
  int32_t active_requests = 0;  // now
  int32_t queued_requests = 0;  // now
  int32_t total_pages = 0;
  // Asked for, and possible: where state is recurrent, of engines that keep snapshots of it.
  bool prefix_cache = false;
  int32_t free_pages = 0;        // now; hold nothing
  int32_t cached_pages = 0;      // now; only the prefix cache's, given up when needed
  bool exact_tree_state = true;  // siblings leave each other's state alone, as the engine says
  int32_t total_snapshots = 0;   // places for snapshots of recurrent state
  int32_t cached_snapshots = 0;  // now; beside cached pages
  int64_t snapshots_saved = 0;
  int64_t snapshots_loaded = 0;
  int64_t finished_requests = 0;
  int64_t cancelled_requests = 0;
  int64_t preemptions = 0;
  int64_t extended_tokens = 0;       // committed to the drafter's context too
  int64_t drafter_catch_ups = 0;     // times a request ran tokens again to draft
  int64_t prompt_tokens = 0;         // of admitted requests
  int64_t cached_prompt_tokens = 0;  // of those, taken from the prefix cache
  int64_t output_tokens = 0;
  int64_t verify_forwards = 0;  // summed over requests
  int64_t drafted_tokens = 0;
  int64_t accepted_tokens = 0;
  int32_t last_step_rows = 0;
  int32_t last_step_requests = 0;
  int32_t last_step_tree_nodes = 0;  // besides roots
  int32_t max_step_requests = 0;     // most requests any step held
};

// enqueue_request: max_queue_size requests wait already.
class QueueFull : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Executor {
 public:
  // The engine must outlive the executor, and serve no other: its pages are this one's, those
  // of finished requests too.
  Executor(Engine& engine, ExecutorConfig config);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Queue a request; returns its id. Throws std::invalid_argument, naming the parameter
  // and both values, for what the engine cannot do; QueueFull; std::runtime_error after
  // shutdown.
  int64_t enqueue_request(Request request);

  // Run rounds until some request has news; one response per request that has. With no
  // request left, wait for one as long as timeout_seconds, then return nothing. What an engine
  // throws passes through, and its round has not been: the next call decodes it again. Throws
  // std::invalid_argument for a timeout that is NaN.
  std::vector<Response> await_responses(double timeout_seconds = 0.0);

  // End a request before the next round; its last response says so. Unknown or finished
  // ids are ignored.
  void cancel_request(int64_t request_id);

  // Take no more requests and end those there are; await_responses tells, and waits no more.
  void shutdown();

  // What happened in each round since the last call, if config.record_rounds.
  std::vector<RoundRecord> take_rounds();

  // As of the end of the last round; queued requests include those not taken up yet.
  ExecutorStatistics latest_statistics() const;

 private:
  using Requests = std::deque<std::unique_ptr<ActiveRequest>>;

  // Between rounds: executor.cpp.
  std::vector<Response> take_mail();
  bool await_mail(double timeout_seconds);
  Response cancel(int64_t request_id);
  void publish_statistics();
  bool paged() const { return capabilities_.kv_layout == KvLayout::kPaged; }
  bool reuses_prefixes() const;
  bool no_evict() const {
    return config_.scheduler_config.capacity_scheduler_policy ==
           CapacitySchedulerPolicy::kGuaranteedNoEvict;
  }
  int32_t pages_for(const Request& request, int32_t tokens) const;
  int32_t admission_tokens(const ActiveRequest& request) const;
  void admit();
  bool admit(ActiveRequest& request);
  void load_state(ActiveRequest& request, int32_t snapshot);
  std::vector<ActiveRequest*> schedule();
  bool make_room(ActiveRequest& request, std::vector<ActiveRequest*>& scheduled);
  void preempt(ActiveRequest& request);
  void requeue_preempted();
  void leave(ActiveRequest& request);
  void retire(const std::vector<Response>& responses);

  // Who drafts: executor_drafting.cpp.
  void turn_drafting();
  RoundLoad steady_load() const;
  void end_drafting();
  void begin_drafting(const RoundLoad& load);
  bool admit_to_draft(ActiveRequest& request);
  bool may_probe(const ActiveRequest& request) const;
  void choose_probe(const RoundLoad& load);
  int32_t missing_tokens(const ActiveRequest& request) const;
  bool has_room_again(const ActiveRequest& request) const;
  void catch_up(ActiveRequest& request);
  void choose_drafting(std::span<ActiveRequest* const> requests);

  // One round: executor_round.cpp.
  struct RowOutputs;
  struct RoundTimes;
  class Before;
  std::vector<Response> run_round(const std::vector<ActiveRequest*>& scheduled);
  std::vector<Response> settle(const std::vector<ActiveRequest*>& scheduled, const RowBatch& batch,
                               const StepResult& result, const RoundTimes& times);
  void take_snapshots(ActiveRequest& request, Commit& commit);
  void keep_snapshots(ActiveRequest& request, const Commit& commit);
  void keep(std::vector<RoundRecord> records, const RoundTimes& times);
  void draft(const std::vector<ActiveRequest*>& scheduled);
  bool adaptive_drafts(const std::vector<ActiveRequest*>& scheduled) const;
  void fit_budgets(const std::vector<ActiveRequest*>& scheduled);
  RoundLoad load_of(const std::vector<ActiveRequest*>& scheduled) const;
  void count_step(const std::vector<ActiveRequest*>& scheduled, const RowBatch& batch);
  Response accept(ActiveRequest& request, const RowOutputs& outputs, std::vector<int32_t>& rows);
  void emit(ActiveRequest& request, int32_t token, Response& response);
  void take_prompt_log_probs(ActiveRequest& request, const RowOutputs& outputs);
  RoundRecord record_of(const ActiveRequest& request, const RowBatch& batch, size_t index,
                        const Commit& commit, const Response& response) const;

  Engine& engine_;
  const Capabilities capabilities_;
  const ExecutorConfig config_;
  KvPages pages_;
  std::optional<AdaptiveBudget> adaptive_;
  AdaptiveBudget::Phase phase_ = AdaptiveBudget::Phase::kLearning;  // of adaptive requests
  int32_t plain_rounds_ = 0;                                        // since that was another
  std::vector<int32_t> free_slots_;
  Requests queue_;   // in order of arrival
  Requests active_;  // in order of arrival
  ExecutorStatistics statistics_;
  std::mutex round_;  // held while rounds run

  mutable std::mutex mailbox_;  // guards what follows
  std::condition_variable mail_;
  Requests arrivals_;
  std::vector<int64_t> cancellations_;
  int64_t next_id_ = 1;
  bool shut_down_ = false;
  ExecutorStatistics published_;
  std::vector<RoundRecord> rounds_;
};

}  // namespace trtree
