#include "runtime/cpp/executor.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/cpp/drafting.hpp"
#include "runtime/cpp/request_checks.hpp"

namespace trtree {

namespace {

// Seconds. What is longer, infinity included, has no end: the clock could not count it.
constexpr double kLongestWait = 1e9;

const auto by_arrival = [](const auto& a, const auto& b) { return a->request_id < b->request_id; };

auto find(auto& requests, int64_t request_id) {
  return std::find_if(requests.begin(), requests.end(),
                      [&](const auto& request) { return request->request_id == request_id; });
}

// Prompt rows of one step. Where log-probs of the prompt are wanted, each row brings the
// logits of the whole vocabulary: 64 MiB of them at most, and where KV is contiguous no more
// rows with outputs than a verify group has.
int32_t chunk_limit(const ActiveRequest& request, const Capabilities& capabilities) {
  constexpr int32_t kMostLogits = (64 << 20) / sizeof(float);
  if (request.request.output.prompt_log_probs < 0) return capabilities.max_num_rows;
  const int32_t rows = std::max(1, kMostLogits / capabilities.vocab_size);
  return capabilities.kv_layout == KvLayout::kContiguous ? std::min(rows, capabilities.verify_width)
                                                         : rows;
}

}  // namespace

Executor::Executor(Engine& engine, ExecutorConfig config)
    : engine_(engine),
      capabilities_((check_capabilities(engine.capabilities()), engine.capabilities())),
      config_(std::move(config)),
      pages_(paged() ? capabilities_.num_pages : 0, paged() ? capabilities_.page_size : 1,
             reuses_prefixes(),
             capabilities_.recurrent_state ? std::optional(capabilities_.state_snapshots)
                                           : std::nullopt) {
  if (config_.kv_cache_config.snapshot_interval < 1) {
    throw std::invalid_argument("snapshot_interval must be at least 1, not " +
                                std::to_string(config_.kv_cache_config.snapshot_interval));
  }
  if (config_.cost_model) adaptive_.emplace(*config_.cost_model);
  free_slots_.resize(capabilities_.max_batch_size);
  std::iota(free_slots_.rbegin(), free_slots_.rend(), 0);
  statistics_.total_pages = pages_.num_free();
  statistics_.total_snapshots = pages_.num_snapshots();
  statistics_.exact_tree_state = capabilities_.tree_state == TreeState::kExact;
  statistics_.prefix_cache = reuses_prefixes();
  publish_statistics();
}

Executor::~Executor() = default;

bool Executor::reuses_prefixes() const {
  return paged() && config_.kv_cache_config.enable_block_reuse &&
         (!capabilities_.recurrent_state || capabilities_.state_snapshots > 0);
}

int64_t Executor::enqueue_request(Request request) {
  check_request(request, capabilities_, config_);
  const auto most_tokens =
      static_cast<int32_t>(request.prompt_token_ids.size()) + request.max_tokens;
  const int32_t pages = pages_for(request, most_tokens);
  if (paged() && pages > capabilities_.num_pages) {
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
  arrivals_.push_back(std::make_unique<ActiveRequest>(next_id_, std::move(request)));
  mail_.notify_one();
  return next_id_++;
}

std::vector<Response> Executor::await_responses(double timeout_seconds) {
  if (std::isnan(timeout_seconds)) throw std::invalid_argument("timeout_seconds is NaN");
  const std::lock_guard lock(round_);
  std::vector<Response> responses;
  while (responses.empty()) {
    responses = take_mail();
    turn_drafting();
    admit();
    if (!responses.empty()) break;
    if (active_.empty()) {
      publish_statistics();
      if (!await_mail(timeout_seconds)) break;
      continue;
    }
    const std::vector<ActiveRequest*> scheduled = schedule();
    publish_statistics();  // others look and queue while the round runs
    responses = run_round(scheduled);
    retire(responses);
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

void Executor::shutdown() {
  const std::lock_guard lock(mailbox_);
  shut_down_ = true;
  mail_.notify_one();
}

std::vector<RoundRecord> Executor::take_rounds() {
  const std::lock_guard lock(mailbox_);
  return std::exchange(rounds_, {});
}

// Whether anything came before the timeout.
bool Executor::await_mail(double timeout_seconds) {
  std::unique_lock lock(mailbox_);
  const auto some = [&] { return !arrivals_.empty() || !cancellations_.empty(); };
  const auto over = [&] { return some() || shut_down_; };
  if (timeout_seconds > kLongestWait) {
    mail_.wait(lock, over);
  } else {
    mail_.wait_for(lock, std::chrono::duration<double>(std::max(0.0, timeout_seconds)), over);
  }
  return some();
}

// Queue what arrived, end what was cancelled; a last response for each of the latter.
std::vector<Response> Executor::take_mail() {
  std::vector<int64_t> cancellations;
  {
    const std::lock_guard lock(mailbox_);
    queue_.insert(queue_.end(), std::make_move_iterator(arrivals_.begin()),
                  std::make_move_iterator(arrivals_.end()));
    arrivals_.clear();
    published_.queued_requests = static_cast<int32_t>(queue_.size());
    cancellations.swap(cancellations_);
    if (shut_down_) {
      for (const Requests* requests : {&queue_, &active_}) {
        for (const auto& request : *requests) cancellations.push_back(request->request_id);
      }
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
  for (Requests* requests : {&queue_, &active_}) {
    const auto found = find(*requests, request_id);
    if (found == requests->end()) continue;
    response.statistics = (*found)->statistics;
    response.finish_reason = FinishReason::kCancelled;
    leave(**found);
    requests->erase(found);
    ++statistics_.cancelled_requests;
    break;
  }
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
  statistics_.free_pages = pages_.num_free();
  statistics_.cached_pages = pages_.num_cached();
  statistics_.cached_snapshots = pages_.num_kept_snapshots();
  const std::lock_guard lock(mailbox_);
  published_ = statistics_;
}

// Pages for this many tokens, and behind the last one the rows of a verify step or of the
// drafter's block.
int32_t Executor::pages_for(const Request& request, int32_t tokens) const {
  if (!paged()) return 0;
  const int32_t headroom =
      std::max(verify_rows(capabilities_, request.speculative), capabilities_.block_size);
  return (tokens + headroom + capabilities_.page_size - 1) / capabilities_.page_size;
}

// First come, first served: a large request is not overtaken by smaller ones behind it.
void Executor::admit() {
  while (!queue_.empty() && !free_slots_.empty() && admit(*queue_.front())) {
    const auto at = std::upper_bound(active_.begin(), active_.end(), queue_.front(), by_arrival);
    active_.insert(at, std::move(queue_.front()));
    queue_.pop_front();
  }
}

// Tokens that there has to be room for: all a request has so far, so that it is not pre-empted
// before it has decoded any, or all it can ever have.
int32_t Executor::admission_tokens(const ActiveRequest& request) const {
  return no_evict() ? request.num_prompt() + request.request.max_tokens : request.num_tokens();
}

bool Executor::admit(ActiveRequest& request) {
  const int32_t pages = pages_for(request.request, admission_tokens(request));
  const bool keeps_drafter = admit_to_draft(request);
  // At least one row has to run; a prompt whose log-probs are wanted has to run whole.
  KvPages::Prefix prefix;
  if (request.request.output.prompt_log_probs < 0) {
    const auto reusable = std::span(request.tokens).first(request.num_tokens() - 1);
    prefix = pages_.acquire_prefix(request.lease, reusable, keeps_drafter);
    request.committed_length = prefix.length;
    request.snapshots = {prefix.paged, prefix.length, prefix.length};
  }
  const int32_t missing = pages - static_cast<int32_t>(request.lease.pages.size());
  if (missing > pages_.num_available() || (no_evict() && !pages_.grow(request.lease, pages))) {
    pages_.release(request.lease);
    request.committed_length = 0;
    return false;
  }
  request.keeps_drafter = keeps_drafter;
  request.drafter_length = 0;
  request.slot = free_slots_.back();
  free_slots_.pop_back();
  if (prefix.snapshot >= 0) load_state(request, prefix.snapshot);
  if (!std::exchange(request.admitted, true)) {
    request.statistics.queue_seconds =
        std::chrono::duration<double>(ActiveRequest::Clock::now() - request.arrived).count();
    request.statistics.cached_tokens = request.committed_length;
    statistics_.prompt_tokens += request.num_prompt();
    statistics_.cached_prompt_tokens += request.committed_length;
  }
  request.statistics.inexact_tree_state = request.request.speculative.mode == DecodingMode::kTree &&
                                          capabilities_.tree_state == TreeState::kInexact;
  return true;
}

// Its slot continues the prefix. Where that fails it waits on, and begins anew.
void Executor::load_state(ActiveRequest& request, int32_t snapshot) {
  try {
    engine_.load_state(snapshot, request.slot);
  } catch (...) {
    leave(request);
    throw;
  }
  ++statistics_.snapshots_loaded;
}

// Who runs this round: those that found no room in the last ones, then decoding requests,
// then prompt chunks in the rows left. A prompt that goes before decoding requests leaves
// them half the rows.
std::vector<ActiveRequest*> Executor::schedule() {
  std::vector<ActiveRequest*> order;
  for (const auto& request : active_) order.push_back(request.get());
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::pair(-a->rounds_skipped, a->prefilling()) <
           std::pair(-b->rounds_skipped, b->prefilling());
  });
  choose_drafting(order);
  const bool decoding =
      std::any_of(order.begin(), order.end(), [](const auto* r) { return !r->prefilling(); });

  int32_t rows_left = capabilities_.max_num_rows;
  std::vector<ActiveRequest*> scheduled;
  for (ActiveRequest* request : order) {
    if (request->slot < 0) continue;  // pre-empted for one before it
    const bool first = request->rounds_skipped++ > 0;
    int32_t rows;
    if (request->prefilling()) {
      rows = std::min({rows_left, request->prefill_left(), chunk_limit(*request, capabilities_)});
      if (first && decoding) rows = std::min(rows, std::max(1, capabilities_.max_num_rows / 2));
      request->chunk = rows;
    } else {
      request->chunk = 0;
      // An adaptive tree's nodes share the rows that are left over.
      rows = request->adaptive() ? 1 : verify_rows(capabilities_, request->drafting);
    }
    if (rows == 0 || rows > rows_left || !make_room(*request, scheduled)) continue;
    request->rounds_skipped = 0;
    rows_left -= rows;
    scheduled.push_back(request);
  }
  requeue_preempted();
  return scheduled;
}

// Those that lost their slot wait again, in order of arrival.
void Executor::requeue_preempted() {
  for (auto request = active_.begin(); request != active_.end();) {
    if ((*request)->slot >= 0) {
      ++request;
      continue;
    }
    const auto at = std::upper_bound(queue_.begin(), queue_.end(), *request, by_arrival);
    queue_.insert(at, std::move(*request));
    request = active_.erase(request);
  }
}

// Pages for the request's rows of this round, by pre-empting younger requests if need be.
// False: it is the youngest and was pre-empted itself.
bool Executor::make_room(ActiveRequest& request, std::vector<ActiveRequest*>& scheduled) {
  const int32_t pages = pages_for(request.request, request.committed_length + request.chunk);
  while (!pages_.grow(request.lease, pages)) {
    const auto youngest = std::find_if(active_.rbegin(), active_.rend(),
                                       [](const auto& active) { return active->slot >= 0; });
    ActiveRequest& victim = **youngest;
    std::erase(scheduled, &victim);
    preempt(victim);
    if (&victim == &request) return false;
  }
  return true;
}

// Take a request's pages away; it will commit its tokens again, from the prefix cache if
// they are still there.
void Executor::preempt(ActiveRequest& request) {
  leave(request);
  request.rounds_skipped = 0;
  ++request.statistics.preemptions;
  ++statistics_.preemptions;
}

// Give back what a request holds.
void Executor::leave(ActiveRequest& request) {
  pages_.release(request.lease);
  request.snapshots = {};
  request.committed_length = 0;
  if (request.slot >= 0) free_slots_.push_back(request.slot);
  request.slot = -1;
}

void Executor::retire(const std::vector<Response>& responses) {
  for (const Response& response : responses) {
    if (!response.finished()) continue;
    const auto found = find(active_, response.request_id);
    leave(**found);
    active_.erase(found);
    ++statistics_.finished_requests;
  }
}

}  // namespace trtree
