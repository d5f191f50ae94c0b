// One round of the executor: draft, verify, take the target's choices, commit.
#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

#include "runtime/cpp/drafting.hpp"
#include "runtime/cpp/executor.hpp"
#include "runtime/cpp/request_checks.hpp"

namespace trtree {

namespace {

using Clock = ActiveRequest::Clock;

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

// The rows of one request: a prompt chunk, or the bonus token and its draft tree.
SegmentRequest segment_of(const ActiveRequest& request) {
  SegmentRequest segment{request.sequence(), {}, {}, {}, request.needs_logits()};
  if (request.chunk > 0) {
    const auto first = request.tokens.begin() + request.committed_length;
    segment.token_ids.assign(first, first + request.chunk);
    segment.parents.resize(request.chunk);
    std::iota(segment.parents.begin(), segment.parents.end(), -1);
    if (request.wants_prompt_log_probs()) segment.needs_logits = true;
    const int32_t outputs = request.wants_prompt_log_probs() ? request.chunk
                            : request.chooses_first()        ? 1
                                                             : 0;
    segment.output_rows.resize(outputs);
    std::iota(segment.output_rows.begin(), segment.output_rows.end(), request.chunk - outputs);
    return segment;
  }
  segment.token_ids = {request.tokens.back()};
  segment.token_ids.insert(segment.token_ids.end(), request.tree.token_ids.begin(),
                           request.tree.token_ids.end());
  segment.parents = request.tree.parents;
  segment.output_rows.resize(segment.token_ids.size());
  std::iota(segment.output_rows.begin(), segment.output_rows.end(), 0);
  return segment;
}

}  // namespace

struct Executor::RoundTimes {
  Clock::time_point started = {}, drafted = {}, stepped = {};
};

// What a step says of one request's output rows.
struct Executor::RowOutputs {
  std::span<const int32_t> argmax;  // [outputs]
  std::span<const float> logits;    // [outputs, vocab_size], or nothing
  int32_t vocab_size;

  std::span<const float> logits_of(size_t output) const {
    return logits.subspan(output * vocab_size, vocab_size);
  }
};

// A request as it was before the round's choices were made.
class Executor::Before {
 public:
  explicit Before(const ActiveRequest* request)
      : num_tokens_(request->tokens.size()),
        num_prompt_log_probs_(request->prompt_log_probs.size()),
        statistics_(request->statistics) {}

  void restore(ActiveRequest& request) const {
    for (; request.tokens.size() > num_tokens_; request.tokens.pop_back()) {
      if (uses_counts(request.request.sampling)) request.counts.take_back(request.tokens.back());
    }
    request.prompt_log_probs.resize(num_prompt_log_probs_);
    request.statistics = statistics_;
  }

 private:
  size_t num_tokens_;
  size_t num_prompt_log_probs_;
  RequestStatistics statistics_;
};

std::vector<Response> Executor::run_round(const std::vector<ActiveRequest*>& scheduled) {
  RoundTimes times{.started = Clock::now()};
  draft(scheduled);
  times.drafted = Clock::now();
  std::vector<SegmentRequest> segments;
  for (const ActiveRequest* request : scheduled) segments.push_back(segment_of(*request));
  const RowBatch batch(std::move(segments));
  const StepResult result = engine_.step(batch);
  check_step(result, batch, capabilities_.vocab_size);
  times.stepped = Clock::now();
  count_step(scheduled, batch);

  const std::vector<Before> before(scheduled.begin(), scheduled.end());
  const ExecutorStatistics statistics = statistics_;
  try {
    return settle(scheduled, batch, result, times);
  } catch (...) {
    // Nobody has been told of the round's tokens, and what a commit that failed has left of
    // the KV is not known: they are decoded again, from what was committed before.
    statistics_ = statistics;
    pages_.drop_taken_snapshots();
    for (size_t i = 0; i < scheduled.size(); ++i) {
      before[i].restore(*scheduled[i]);
      preempt(*scheduled[i]);
    }
    requeue_preempted();
    publish_statistics();
    throw;
  }
}

// Take and commit the target's choices; the responses that tell them.
std::vector<Response> Executor::settle(const std::vector<ActiveRequest*>& scheduled,
                                       const RowBatch& batch, const StepResult& result,
                                       const RoundTimes& times) {
  std::vector<Commit> commits;
  std::vector<Response> responses;
  std::vector<RoundRecord> records;
  size_t output = 0, logits = 0;
  for (size_t i = 0; i < scheduled.size(); ++i) {
    ActiveRequest& request = *scheduled[i];
    const Segment& segment = batch.segments[i];
    const auto last = std::lower_bound(batch.output_rows.begin(), batch.output_rows.end(),
                                       segment.first_row + segment.num_rows);
    const size_t outputs = last - batch.output_rows.begin() - output;
    const size_t floats =
        outputs > 0 && batch.needs_logits[output] ? outputs * capabilities_.vocab_size : 0;
    const RowOutputs own{std::span(result.argmax).subspan(output, outputs),
                         std::span(result.logits).subspan(logits, floats),
                         capabilities_.vocab_size};
    output += outputs;
    logits += floats;

    Commit commit{segment.sequence, {}, request.keeps_drafter};
    Response response = accept(request, own, commit.rows);
    take_snapshots(request, commit);
    if (config_.record_rounds) records.push_back(record_of(request, batch, i, commit, response));
    commits.push_back(std::move(commit));
    responses.push_back(std::move(response));
  }
  engine_.commit(commits);
  for (size_t i = 0; i < scheduled.size(); ++i) {
    ActiveRequest& request = *scheduled[i];
    const auto rows = static_cast<int32_t>(commits[i].rows.size());
    request.committed_length += rows;
    if (request.keeps_drafter) statistics_.extended_tokens += rows;
    pages_.publish(request.lease, request.committed(), request.keeps_drafter);
    keep_snapshots(request, commits[i]);
    if (responses[i].token_ids.empty()) continue;
    responses[i].prompt_log_probs = std::exchange(request.prompt_log_probs, {});
  }
  std::erase_if(responses, [](const Response& response) { return response.token_ids.empty(); });
  keep(std::move(records), times);
  return responses;
}

// Have the commit save the states it passes that are worth a snapshot.
void Executor::take_snapshots(ActiveRequest& request, Commit& commit) {
  if (pages_.num_snapshots() == 0) return;
  const int32_t begin = request.committed_length;
  const int32_t end = begin + static_cast<int32_t>(commit.rows.size());
  for (const auto [at, moves] :
       request.snapshots.next(begin, end, request.num_prompt(), capabilities_.page_size,
                              config_.kv_cache_config.snapshot_interval)) {
    const int32_t snapshot =
        pages_.take_snapshot(request.lease, std::span(request.tokens).first(at), moves);
    if (snapshot >= 0) commit.saves.push_back({at - begin, snapshot});
  }
}

// They have been written.
void Executor::keep_snapshots(ActiveRequest& request, const Commit& commit) {
  for (const StateSave& save : commit.saves) {
    const int32_t tokens = commit.sequence.committed_length + save.rows;
    pages_.keep_snapshot(request.lease, tokens / capabilities_.page_size, save.snapshot);
    ++statistics_.snapshots_saved;
  }
}

// Records of a round that ends now, for take_rounds().
void Executor::keep(std::vector<RoundRecord> records, const RoundTimes& times) {
  if (records.empty()) return;
  const auto accepted = Clock::now();
  for (RoundRecord& record : records) {
    record.draft_seconds = seconds_between(times.started, times.drafted);
    record.step_seconds = seconds_between(times.drafted, times.stepped);
    record.accept_seconds = seconds_between(times.stepped, accepted);
  }
  const std::lock_guard lock(mailbox_);
  rounds_.insert(rounds_.end(), records.begin(), records.end());
}

// How full the round is before any adaptive tree has a node.
RoundLoad Executor::load_of(const std::vector<ActiveRequest*>& scheduled) const {
  RoundLoad load{.requests = 0};
  for (const ActiveRequest* request : scheduled) {
    if (request->chunk == 0 && request->adaptive() && request->drafts) {
      ++load.requests;
      load.mean_context += request->committed_length;
      continue;
    }
    ++load.other_requests;
    load.other_rows += request->chunk > 0    ? request->chunk
                       : request->adaptive() ? 1
                                             : verify_rows(capabilities_, request->drafting);
  }
  load.mean_context /= std::max(1, load.requests);
  load.max_nodes = capabilities_.max_num_rows - load.other_rows - load.requests;
  return load;
}

// Cut adaptive requests' trees, all together, to what is worth its rows.
void Executor::fit_budgets(const std::vector<ActiveRequest*>& scheduled) {
  std::vector<ActiveRequest*> requests;
  std::vector<const ddtree::Tree*> trees;
  for (ActiveRequest* request : scheduled) {
    if (request->chunk > 0 || !request->adaptive() || request->tree.num_rows() == 1) continue;
    requests.push_back(request);
    trees.push_back(&request->tree);
  }
  if (trees.empty()) return;
  // What is only tried verifies a node at least: nothing else tells what is accepted.
  const int32_t least = phase_ == AdaptiveBudget::Phase::kDrafting ? 0 : 1;
  const std::vector<int32_t> nodes = adaptive_->choose(load_of(scheduled), trees, least);
  for (size_t i = 0; i < requests.size(); ++i) requests[i]->tree.keep_first(nodes[i]);
}

// Whether adaptive requests draft in this round, those that may.
bool Executor::adaptive_drafts(const std::vector<ActiveRequest*>& scheduled) const {
  const RoundLoad load = load_of(scheduled);
  if (load.requests == 0 || load.max_nodes <= 0) return false;
  const bool chunks =
      std::any_of(scheduled.begin(), scheduled.end(), [](const auto* r) { return r->chunk > 0; });
  return !chunks || phase_ != AdaptiveBudget::Phase::kDrafting || adaptive_->pays(load);
}

// One drafter pass for all decoding requests that can use one.
void Executor::draft(const std::vector<ActiveRequest*>& scheduled) {
  std::vector<ActiveRequest*> drafted;
  std::vector<DraftRequest> requests;
  int32_t top_k = 1;
  const bool adaptive_draft = adaptive_drafts(scheduled);
  for (ActiveRequest* request : scheduled) {
    if (request->chunk > 0) continue;
    request->tree = ddtree::chain({});
    if (request->adaptive() && !(adaptive_draft && request->drafts)) continue;
    const SpeculativeConfig& config = request->drafting;
    if (useful_depth(capabilities_, config, request->tokens_wanted()) == 0) continue;
    drafted.push_back(request);
    requests.push_back({request->sequence(), request->tokens.back()});
    top_k = std::max(top_k, draft_top_k(capabilities_, config));
  }
  if (drafted.empty()) return;
  const DraftResult result = engine_.draft(requests, top_k);
  ++statistics_.drafter_forwards;
  check_draft(result, requests.size(), top_k);
  for (size_t i = 0; i < drafted.size(); ++i) {
    ActiveRequest& request = *drafted[i];
    const SpeculativeConfig& config = request.drafting;
    const int32_t depth =
        std::min(result.depth, useful_depth(capabilities_, config, request.tokens_wanted()));
    request.tree = draft_tree(capabilities_, config, result, static_cast<int32_t>(i), depth,
                              config_.medusa_choices);
  }
  fit_budgets(scheduled);
}

void Executor::count_step(const std::vector<ActiveRequest*>& scheduled, const RowBatch& batch) {
  ++statistics_.target_forwards;
  statistics_.last_step_rows = batch.num_rows();
  statistics_.last_step_requests = static_cast<int32_t>(scheduled.size());
  statistics_.max_step_requests =
      std::max(statistics_.max_step_requests, statistics_.last_step_requests);
  statistics_.last_step_tree_nodes = 0;
  for (const ActiveRequest* request : scheduled) {
    if (request->chunk == 0) statistics_.last_step_tree_nodes += request->tree.num_rows() - 1;
  }
}

// Take the target's choices for one request: the rows to commit, and its new tokens, cut at
// stop tokens and max_tokens. Rows behind the cut are not committed.
Response Executor::accept(ActiveRequest& request, const RowOutputs& outputs,
                          std::vector<int32_t>& rows) {
  Response response{.request_id = request.request_id};
  // The target's choice at a row, its last output token. `token_ids` grows by it.
  const auto choose = [&](size_t output) {
    const SamplingConfig& sampling = request.request.sampling;
    const int32_t token = sampling.needs_logits()
                              ? trtree::choose(outputs.logits_of(output), sampling, request.counts,
                                               request.num_tokens())
                              : outputs.argmax[output];
    if (request.request.output.log_probs >= 0) {
      response.log_probs.push_back(
          log_probs(outputs.logits_of(output), token, request.request.output.log_probs));
    }
    emit(request, token, response);
    return token;
  };

  if (request.chunk > 0) {
    ++request.statistics.prefill_forwards;
    rows.resize(request.chunk);
    std::iota(rows.begin(), rows.end(), 0);
    if (request.wants_prompt_log_probs()) take_prompt_log_probs(request, outputs);
    if (request.chooses_first()) choose(outputs.argmax.size() - 1);
  } else {
    rows = {0};
    // Down the tree, while the choice is a child and nothing ends the output before.
    for (int32_t token = choose(0); !response.finished(); token = choose(rows.back())) {
      const int32_t child = request.tree.child(rows.back(), token);
      if (child < 0) break;
      rows.push_back(child);
    }
    const auto emitted = static_cast<int32_t>(response.token_ids.size());
    const int32_t nodes = request.tree.num_rows() - 1;
    const auto accepted = static_cast<int32_t>(rows.size()) - 1;
    if (nodes > 0 && request.probe_trees > 0) --request.probe_trees;
    // An output that ends early says nothing of the nodes behind its end.
    if (request.adaptive() && nodes > 0 && !response.finished()) {
      adaptive_->observe(request.tree, accepted);
    }
    ++request.statistics.verify_forwards;
    request.statistics.drafted_tokens += nodes;
    request.statistics.accepted_tokens += accepted;
    request.statistics.decoded_tokens += emitted;
    ++statistics_.verify_forwards;
    statistics_.drafted_tokens += nodes;
    statistics_.accepted_tokens += accepted;
  }
  statistics_.output_tokens += static_cast<int64_t>(response.token_ids.size());
  response.statistics = request.statistics;
  return response;
}

void Executor::emit(ActiveRequest& request, int32_t token, Response& response) {
  request.tokens.push_back(token);
  if (uses_counts(request.request.sampling)) request.counts.add(token);
  response.token_ids.push_back(token);
  const auto& stops = request.request.stop_token_ids;
  if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
    response.finish_reason = FinishReason::kStopToken;
  } else if (request.tokens_wanted() == 0) {
    response.finish_reason = FinishReason::kLength;
  }
}

// Row i of the chunk says how likely the prompt's next token was.
void Executor::take_prompt_log_probs(ActiveRequest& request, const RowOutputs& outputs) {
  for (int32_t row = 0; row < request.chunk; ++row) {
    const int32_t next = request.committed_length + row + 1;
    const auto known = static_cast<int32_t>(request.prompt_log_probs.size());
    // A chunk that is run again after a pre-emption has been read already.
    if (next != known + 1 || next >= request.num_prompt()) continue;
    request.prompt_log_probs.push_back(log_probs(outputs.logits_of(row), request.tokens[next],
                                                 request.request.output.prompt_log_probs));
  }
}

RoundRecord Executor::record_of(const ActiveRequest& request, const RowBatch& batch, size_t index,
                                const Commit& commit, const Response& response) const {
  const Segment& segment = batch.segments[index];
  const auto first = batch.token_ids.begin() + segment.first_row;
  RoundRecord record;
  record.round = statistics_.target_forwards;
  record.request_id = request.request_id;
  record.prefill = request.chunk > 0;
  record.committed_length = segment.sequence.committed_length;
  record.token_ids.assign(first, first + segment.num_rows);
  if (!record.prefill) record.parents = request.tree.parents;
  record.accepted = commit.rows;
  record.emitted_tokens = static_cast<int32_t>(response.token_ids.size());
  record.extends_drafter = commit.extend_drafter;
  record.tree_budget = record.prefill       ? 0
                       : request.adaptive() ? request.tree.num_rows() - 1
                                            : verify_rows(capabilities_, request.drafting) - 1;
  record.queue_seconds = request.statistics.queue_seconds;
  record.step_rows = batch.num_rows();
  record.step_requests = static_cast<int32_t>(batch.segments.size());
  return record;
}

}  // namespace trtree
