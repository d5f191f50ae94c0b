// In-flight batching over an Engine: admits requests, drafts, verifies, commits.
// Knows nothing of layers, text or Python.
//
// Any thread may call any method. Rounds run in await_responses, one at a time; requests
// and cancellations wait in a mailbox and are taken up between rounds.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/cpp/engine.hpp"
#include "runtime/cpp/kv_page_pool.hpp"
#include "runtime/cpp/request.hpp"

namespace trtree {

struct ExecutorConfig {
  // Rank paths of the engine's static tree, breadth-first; empty: it has none.
  std::vector<std::vector<int32_t>> medusa_choices;
  // Verify branching trees even where sibling branches disturb each other's state.
  bool allow_unsafe_tree_state = false;
};

struct ExecutorStatistics {
  int64_t target_forwards = 0;
  int64_t drafter_forwards = 0;
  int32_t active_requests = 0;
  int32_t queued_requests = 0;
  int32_t free_pages = 0;
};

class Executor {
 public:
  // The engine must outlive the executor.
  Executor(Engine& engine, ExecutorConfig config);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Queue a request; returns its id. Throws std::invalid_argument, naming the parameter
  // and both values, for what the engine cannot do.
  int64_t enqueue_request(Request request);

  // Run rounds until some request has news; one response per request that has.
  // Returns nothing only if no request is left.
  std::vector<Response> await_responses();

  // End a request before the next round; its last response says so. Unknown or finished
  // ids are ignored.
  void cancel_request(int64_t request_id);

  // As of the end of the last round; queued requests include those not taken up yet.
  ExecutorStatistics latest_statistics() const;

 private:
  struct Active;

  std::vector<Response> take_mail();
  Response cancel(int64_t request_id);
  void publish_statistics();
  void admit();
  std::vector<Active*> schedule();
  void draft(const std::vector<Active*>& scheduled);
  std::vector<Response> verify(const std::vector<Active*>& scheduled);
  void accept(Active& request, const StepResult& result, size_t first_output,
              std::vector<Commit>& commits, std::vector<Response>& responses);
  void retire(const std::vector<Response>& responses);
  int32_t pages_for(const Request& request) const;

  Engine& engine_;
  const Capabilities capabilities_;
  const ExecutorConfig config_;
  KvPagePool pages_;
  std::vector<int32_t> free_slots_;
  std::deque<std::pair<int64_t, Request>> queue_;
  std::deque<std::unique_ptr<Active>> active_;  // the front is scheduled first
  ExecutorStatistics statistics_;
  std::mutex round_;  // held while rounds run

  mutable std::mutex mailbox_;  // guards what follows
  std::deque<std::pair<int64_t, Request>> arrivals_;
  std::vector<int64_t> cancellations_;
  int64_t next_id_ = 1;
  ExecutorStatistics published_;
};

}  // namespace trtree
