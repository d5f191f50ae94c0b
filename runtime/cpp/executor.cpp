#include "runtime/cpp/executor.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/cpp/drafting.hpp"
#include "runtime/cpp/request_checks.hpp"

namespace trtree {

// A request that holds a slot and pages. Its tokens are the prompt followed by the
// output; the first committed_length of them are committed, and while decoding exactly
// one, the bonus token, is not.
struct Executor::Active {
  Request request;
  Sequence sequence;
  std::vector<int32_t> tokens;
  RequestStatistics statistics;
  // This round's rows: a prompt chunk, or a draft tree.
  std::vector<int32_t> chunk;
  ddtree::Tree tree;

  int32_t num_output() const {
    return static_cast<int32_t>(tokens.size() - request.prompt_token_ids.size());
  }
  int32_t tokens_wanted() const { return request.max_tokens - num_output(); }
  bool prefilling() const { return num_output() == 0; }
  int32_t prompt_left() const {
    return static_cast<int32_t>(request.prompt_token_ids.size()) - sequence.committed_length;
  }
};

Executor::Executor(Engine& engine, ExecutorConfig config)
    : engine_(engine),
      capabilities_(engine.capabilities()),
      config_(std::move(config)),
      pages_(capabilities_.kv_layout == KvLayout::kPaged ? capabilities_.num_pages : 0) {
  check_capabilities(capabilities_);
  free_slots_.resize(capabilities_.max_batch_size);
  std::iota(free_slots_.rbegin(), free_slots_.rend(), 0);
  publish_statistics();
}

Executor::~Executor() = default;

int64_t Executor::enqueue_request(Request request) {
  check_request(request, capabilities_, config_);
  const int32_t pages = pages_for(request);
  if (capabilities_.kv_layout == KvLayout::kPaged && pages > capabilities_.num_pages) {
    throw std::invalid_argument("the request needs " + std::to_string(pages) +
                                " KV pages, the engine has " +
                                std::to_string(capabilities_.num_pages) +
                                "; lower max_tokens or build with more kv_tokens");
  }
  const std::lock_guard lock(mailbox_);
  if (shut_down_) throw std::runtime_error("the executor has been shut down");
  const auto waiting = published_.queued_requests + static_cast<int32_t>(arrivals_.size());
  if (config_.max_queue_size > 0 && waiting >= config_.max_queue_size) {
    throw QueueFull(std::to_string(waiting) + " requests wait already, max_queue_size is " +
                    std::to_string(config_.max_queue_size));
  }
  arrivals_.emplace_back(next_id_, std::move(request));
  mail_.notify_one();
  return next_id_++;
}

std::vector<Response> Executor::await_responses(double timeout_seconds) {
  const std::lock_guard lock(round_);
  std::vector<Response> responses;
  while (responses.empty()) {
    responses = take_mail();
    admit();
    if (!responses.empty()) break;
    if (active_.empty()) {
      if (!await_mail(timeout_seconds)) break;
      continue;
    }
    const std::vector<Active*> scheduled = schedule();
    draft(scheduled);
    responses = verify(scheduled);
    publish_statistics();
  }
  publish_statistics();
  return responses;
}

void Executor::cancel_request(int64_t request_id) {
  const std::lock_guard lock(mailbox_);
  cancellations_.push_back(request_id);
  mail_.notify_one();
}

// Whether anything came before the timeout.
bool Executor::await_mail(double timeout_seconds) {
  std::unique_lock lock(mailbox_);
  const auto some = [&] { return !arrivals_.empty() || !cancellations_.empty(); };
  mail_.wait_for(lock, std::chrono::duration<double>(timeout_seconds),
                 [&] { return some() || shut_down_; });
  return some();
}

void Executor::shutdown() {
  const std::lock_guard lock(mailbox_);
  shut_down_ = true;
  mail_.notify_one();
}

std::vector<RoundRecord> Executor::take_rounds() {
  const std::lock_guard lock(mailbox_);
  return std::exchange(rounds_, {});
}

// Queue what arrived, end what was cancelled; a last response for each of the latter.
std::vector<Response> Executor::take_mail() {
  std::vector<int64_t> cancellations;
  {
    const std::lock_guard lock(mailbox_);
    queue_.insert(queue_.end(), std::make_move_iterator(arrivals_.begin()),
                  std::make_move_iterator(arrivals_.end()));
    arrivals_.clear();
    cancellations.swap(cancellations_);
    if (shut_down_) {
      for (const auto& [request_id, request] : queue_) cancellations.push_back(request_id);
      for (const auto& request : active_) cancellations.push_back(request->sequence.request_id);
    }
  }
  std::vector<Response> responses;
  for (const int64_t request_id : cancellations) {
    Response response = cancel(request_id);
    if (response.finished()) responses.push_back(std::move(response));
  }
  return responses;
}

// Not finished: there is no such request.
Response Executor::cancel(int64_t request_id) {
  Response response{.request_id = request_id};
  const auto queued = std::find_if(queue_.begin(), queue_.end(),
                                   [&](const auto& entry) { return entry.first == request_id; });
  if (queued != queue_.end()) {
    queue_.erase(queued);
    response.finish_reason = FinishReason::kCancelled;
    return response;
  }
  const auto active = std::find_if(active_.begin(), active_.end(), [&](const auto& request) {
    return request->sequence.request_id == request_id;
  });
  if (active == active_.end()) return response;
  response.statistics = (*active)->statistics;
  response.finish_reason = FinishReason::kCancelled;
  retire({response});
  return response;
}

ExecutorStatistics Executor::latest_statistics() const {
  const std::lock_guard lock(mailbox_);
  ExecutorStatistics latest = published_;
  latest.queued_requests += static_cast<int32_t>(arrivals_.size());
  return latest;
}

void Executor::publish_statistics() {
  statistics_.active_requests = static_cast<int32_t>(active_.size());
  statistics_.queued_requests = static_cast<int32_t>(queue_.size());
  statistics_.total_pages =
      capabilities_.kv_layout == KvLayout::kPaged ? capabilities_.num_pages : 0;
  statistics_.free_pages = pages_.num_free();
  const std::lock_guard lock(mailbox_);
  published_ = statistics_;
}

// All pages a request can ever need: its tokens, and behind the last one the rows of a
// verify step or of the drafter's block.
int32_t Executor::pages_for(const Request& request) const {
  if (capabilities_.kv_layout != KvLayout::kPaged) return 0;
  const int32_t tokens = static_cast<int32_t>(request.prompt_token_ids.size()) + request.max_tokens;
  const int32_t headroom =
      std::max(verify_rows(capabilities_, request.speculative), capabilities_.block_size);
  return (tokens + headroom + capabilities_.page_size - 1) / capabilities_.page_size;
}

// First come, first served: a large request is not overtaken by smaller ones behind it.
void Executor::admit() {
  while (!queue_.empty() && !free_slots_.empty()) {
    auto& [request_id, request] = queue_.front();
    auto pages = pages_.allocate(pages_for(request));
    if (!pages) return;
    auto active = std::make_unique<Active>();
    active->sequence = {request_id, free_slots_.back(), 0, std::move(*pages)};
    active->tokens = request.prompt_token_ids;
    active->request = std::move(request);
    free_slots_.pop_back();
    queue_.pop_front();
    active_.push_back(std::move(active));
  }
}

// Who runs this round: decoding requests first, then prompt chunks in the rows left; of
// each kind, those that did not fit in the last round come first.
std::vector<Executor::Active*> Executor::schedule() {
  int32_t rows_left = capabilities_.max_num_rows;
  std::vector<Active*> scheduled;
  for (const bool prefill : {false, true}) {
    for (const auto& request : active_) {
      if (request->prefilling() != prefill) continue;
      const int32_t rows = prefill ? std::min(rows_left, request->prompt_left())
                                   : verify_rows(capabilities_, request->request.speculative);
      if (rows == 0 || rows > rows_left) continue;
      if (prefill) {
        const auto first = request->tokens.begin() + request->sequence.committed_length;
        request->chunk.assign(first, first + rows);
      }
      rows_left -= rows;
      scheduled.push_back(request.get());
    }
  }
  std::stable_partition(active_.begin(), active_.end(), [&](const auto& request) {
    return std::find(scheduled.begin(), scheduled.end(), request.get()) == scheduled.end();
  });
  return scheduled;
}

// One drafter pass for all decoding requests that can use one.
void Executor::draft(const std::vector<Active*>& scheduled) {
  std::vector<Active*> drafted;
  std::vector<DraftRequest> requests;
  int32_t top_k = 1;
  for (Active* request : scheduled) {
    if (request->prefilling()) continue;
    request->tree = ddtree::chain({});
    const SpeculativeConfig& config = request->request.speculative;
    if (useful_depth(capabilities_, config, request->tokens_wanted()) == 0) continue;
    drafted.push_back(request);
    requests.push_back({request->sequence, request->tokens.back()});
    top_k = std::max(top_k, draft_top_k(capabilities_, config));
  }
  if (drafted.empty()) return;
  const DraftResult result = engine_.draft(requests, top_k);
  ++statistics_.drafter_forwards;
  check_draft(result, requests.size(), top_k);
  for (size_t i = 0; i < drafted.size(); ++i) {
    Active& request = *drafted[i];
    const SpeculativeConfig& config = request.request.speculative;
    const int32_t depth =
        std::min(result.depth, useful_depth(capabilities_, config, request.tokens_wanted()));
    request.tree = draft_tree(capabilities_, config, result, static_cast<int32_t>(i), depth,
                              config_.medusa_choices);
  }
}

std::vector<Response> Executor::verify(const std::vector<Active*>& scheduled) {
  std::vector<SegmentRequest> segments;
  for (const Active* request : scheduled) {
    SegmentRequest segment{request->sequence, {}, {}, {}, false};
    if (request->prefilling()) {
      segment.token_ids = request->chunk;
      segment.parents.resize(request->chunk.size());
      std::iota(segment.parents.begin(), segment.parents.end(), -1);
      const auto rows = static_cast<int32_t>(request->chunk.size());
      if (rows == request->prompt_left()) segment.output_rows = {rows - 1};
    } else {
      segment.token_ids = {request->tokens.back()};
      segment.token_ids.insert(segment.token_ids.end(), request->tree.token_ids.begin(),
                               request->tree.token_ids.end());
      segment.parents = request->tree.parents;
      segment.output_rows.resize(segment.token_ids.size());
      std::iota(segment.output_rows.begin(), segment.output_rows.end(), 0);
    }
    segments.push_back(std::move(segment));
  }
  const RowBatch batch(std::move(segments));
  const StepResult result = engine_.step(batch);
  ++statistics_.target_forwards;
  check_step(result, batch);

  std::vector<Commit> commits;
  std::vector<Response> responses;
  size_t first_output = 0;
  for (size_t i = 0; i < scheduled.size(); ++i) {
    accept(*scheduled[i], result, first_output, commits, responses);
    const Segment& segment = batch.segments[i];
    while (first_output < batch.output_rows.size() &&
           batch.output_rows[first_output] < segment.first_row + segment.num_rows) {
      ++first_output;
    }
  }
  if (!commits.empty()) engine_.commit(commits);
  retire(responses);
  return responses;
}

// Take the target's choices for one request: append tokens, cut at stop tokens and
// max_tokens, and only then commit. A finished request has nothing left to commit.
void Executor::accept(Active& request, const StepResult& result, size_t first_output,
                      std::vector<Commit>& commits, std::vector<Response>& responses) {
  std::vector<int32_t> rows;
  std::vector<int32_t> new_tokens;
  const bool prefill = request.prefilling();
  if (prefill) {
    ++request.statistics.prefill_forwards;
    rows.resize(request.chunk.size());
    std::iota(rows.begin(), rows.end(), 0);
    if (static_cast<int32_t>(rows.size()) == request.prompt_left()) {
      new_tokens = {result.argmax[first_output]};
    }
  } else {
    const std::span choices(result.argmax.data() + first_output, request.tree.num_rows());
    ddtree::Walk walk = ddtree::walk(request.tree, choices);
    for (size_t i = 1; i < walk.accepted.size(); ++i) {
      new_tokens.push_back(request.tree.token_ids[walk.accepted[i] - 1]);
    }
    new_tokens.push_back(walk.bonus);
    ++request.statistics.verify_forwards;
    request.statistics.drafted_tokens += request.tree.num_rows() - 1;
    request.statistics.accepted_tokens += static_cast<int32_t>(walk.accepted.size()) - 1;
    rows = std::move(walk.accepted);
  }

  Response response{.request_id = request.sequence.request_id};
  const auto& stops = request.request.stop_token_ids;
  for (const int32_t token : new_tokens) {
    request.tokens.push_back(token);
    response.token_ids.push_back(token);
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
      response.finish_reason = FinishReason::kStopToken;
    } else if (request.tokens_wanted() == 0) {
      response.finish_reason = FinishReason::kLength;
    }
    if (response.finished()) break;
  }
  if (!prefill) {
    request.statistics.decoded_tokens += static_cast<int32_t>(response.token_ids.size());
  }
  if (!response.finished()) {
    const bool speculative = request.request.speculative.mode != DecodingMode::kPlain;
    commits.push_back({request.sequence, rows, speculative});
    request.sequence.committed_length += static_cast<int32_t>(rows.size());
  }
  if (!response.token_ids.empty()) {
    response.statistics = request.statistics;
    responses.push_back(std::move(response));
  }
}

// Give back what finished requests held.
void Executor::retire(const std::vector<Response>& responses) {
  for (const Response& response : responses) {
    if (!response.finished()) continue;
    const auto found = std::find_if(active_.begin(), active_.end(), [&](const auto& request) {
      return request->sequence.request_id == response.request_id;
    });
    pages_.release((*found)->sequence.pages);
    free_slots_.push_back((*found)->sequence.slot);
    active_.erase(found);
  }
}

}  // namespace trtree
