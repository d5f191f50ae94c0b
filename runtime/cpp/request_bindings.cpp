// Requests, responses and round records, seen from Python. All of them can be pickled:
// ranks send them to each other.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "runtime/cpp/request.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

namespace {

void bind_enums(nb::module_& m) {
  nb::enum_<DecodingMode>(m, "DecodingMode")
      .value("PLAIN", DecodingMode::kPlain)
      .value("CHAIN", DecodingMode::kChain)
      .value("TREE", DecodingMode::kTree);
  nb::enum_<TreeKind>(m, "TreeKind")
      .value("DYNAMIC", TreeKind::kDynamic)
      .value("STATIC", TreeKind::kStatic);
  nb::enum_<BudgetPolicy>(m, "BudgetPolicy")
      .value("FIXED", BudgetPolicy::kFixed)
      .value("LOAD", BudgetPolicy::kLoad)
      .value("ADAPTIVE", BudgetPolicy::kAdaptive);
  nb::enum_<FinishReason>(m, "FinishReason")
      .value("NOT_FINISHED", FinishReason::kNotFinished)
      .value("STOP_TOKEN", FinishReason::kStopToken)
      .value("LENGTH", FinishReason::kLength)
      .value("CANCELLED", FinishReason::kCancelled);
}

// Pickling by the struct's fields, in order.
template <class Struct, class... Fields>
void pickle(nb::class_<Struct>& cls, Fields Struct::*... fields) {
  using State = std::tuple<Fields...>;
  cls.def("__getstate__", [=](const Struct& self) { return State(self.*fields...); });
  cls.def("__setstate__", [=](Struct& self, const State& state) {
    new (&self) Struct{};
    std::apply([&](const Fields&... values) { ((self.*fields = values), ...); }, state);
  });
}

void bind_sampling(nb::module_& m) {
  nb::class_<SamplingConfig> sampling(m, "SamplingConfig",
                                      "How the target's choice is made at each row: logit bias, "
                                      "penalties, temperature (0: greedy), top-k, top-p, min-p, "
                                      "then one draw that depends on the seed and the position.");
  sampling
      .def(
          "__init__",
          [](SamplingConfig* self, float temperature, int32_t top_k, float top_p, float min_p,
             float repetition_penalty, float presence_penalty, float frequency_penalty,
             std::vector<std::pair<int32_t, float>> logit_bias, uint64_t seed) {
            new (self) SamplingConfig{temperature,
                                      top_k,
                                      top_p,
                                      min_p,
                                      repetition_penalty,
                                      presence_penalty,
                                      frequency_penalty,
                                      std::move(logit_bias),
                                      seed};
          },
          "temperature"_a = 0.0f, "top_k"_a = 0, "top_p"_a = 1.0f, "min_p"_a = 0.0f,
          "repetition_penalty"_a = 1.0f, "presence_penalty"_a = 0.0f, "frequency_penalty"_a = 0.0f,
          "logit_bias"_a = std::vector<std::pair<int32_t, float>>{}, "seed"_a = uint64_t{0})
      .def_rw("temperature", &SamplingConfig::temperature)
      .def_rw("top_k", &SamplingConfig::top_k)
      .def_rw("top_p", &SamplingConfig::top_p)
      .def_rw("min_p", &SamplingConfig::min_p)
      .def_rw("repetition_penalty", &SamplingConfig::repetition_penalty)
      .def_rw("presence_penalty", &SamplingConfig::presence_penalty)
      .def_rw("frequency_penalty", &SamplingConfig::frequency_penalty)
      .def_rw("logit_bias", &SamplingConfig::logit_bias)
      .def_rw("seed", &SamplingConfig::seed);
  pickle(sampling, &SamplingConfig::temperature, &SamplingConfig::top_k, &SamplingConfig::top_p,
         &SamplingConfig::min_p, &SamplingConfig::repetition_penalty,
         &SamplingConfig::presence_penalty, &SamplingConfig::frequency_penalty,
         &SamplingConfig::logit_bias, &SamplingConfig::seed);

  nb::class_<OutputConfig> output(m, "OutputConfig",
                                  "Log-probs wanted for output and prompt tokens: the number of "
                                  "alternatives beside each; -1: none at all.");
  output
      .def(
          "__init__",
          [](OutputConfig* self, int32_t log_probs, int32_t prompt_log_probs) {
            new (self) OutputConfig{log_probs, prompt_log_probs};
          },
          "log_probs"_a = -1, "prompt_log_probs"_a = -1)
      .def_rw("log_probs", &OutputConfig::log_probs)
      .def_rw("prompt_log_probs", &OutputConfig::prompt_log_probs);
  pickle(output, &OutputConfig::log_probs, &OutputConfig::prompt_log_probs);
}

void bind_speculation(nb::module_& m) {
  nb::class_<SpeculativeConfig> speculative(
      m, "SpeculativeConfig",
      "What is drafted: nothing, a chain, or a tree of tree_budget nodes besides the root. "
      "top_k 0: as many ranks per depth as the budget can use. policy: whether each round's "
      "tree has tree_budget nodes or at most that many.");
  speculative
      .def(
          "__init__",
          [](SpeculativeConfig* self, DecodingMode mode, TreeKind tree, int32_t tree_budget,
             int32_t top_k, BudgetPolicy policy, bool chain_seed) {
            new (self) SpeculativeConfig{mode, tree, tree_budget, top_k, policy, chain_seed};
          },
          "mode"_a = DecodingMode::kTree, "tree"_a = TreeKind::kDynamic, "tree_budget"_a = 16,
          "top_k"_a = 0, "policy"_a = BudgetPolicy::kFixed, "chain_seed"_a = false)
      .def_rw("mode", &SpeculativeConfig::mode)
      .def_rw("tree", &SpeculativeConfig::tree)
      .def_rw("tree_budget", &SpeculativeConfig::tree_budget)
      .def_rw("top_k", &SpeculativeConfig::top_k)
      .def_rw("policy", &SpeculativeConfig::policy)
      .def_rw("chain_seed", &SpeculativeConfig::chain_seed);
  pickle(speculative, &SpeculativeConfig::mode, &SpeculativeConfig::tree,
         &SpeculativeConfig::tree_budget, &SpeculativeConfig::top_k, &SpeculativeConfig::policy,
         &SpeculativeConfig::chain_seed);
}

void bind_request(nb::module_& m) {
  nb::class_<Request> request(m, "Request",
                              "One prompt to continue. A stop token is part of the output.");
  request
      .def(
          "__init__",
          [](Request* self, std::vector<int32_t> prompt_token_ids, int32_t max_tokens,
             std::vector<int32_t> stop_token_ids, SamplingConfig sampling,
             SpeculativeConfig speculative, OutputConfig output) {
            new (self) Request{std::move(prompt_token_ids), max_tokens,  std::move(stop_token_ids),
                               std::move(sampling),         speculative, output};
          },
          "prompt_token_ids"_a, "max_tokens"_a = 128, "stop_token_ids"_a = std::vector<int32_t>{},
          "sampling"_a = SamplingConfig{}, "speculative"_a = SpeculativeConfig{},
          "output"_a = OutputConfig{})
      .def_rw("prompt_token_ids", &Request::prompt_token_ids)
      .def_rw("max_tokens", &Request::max_tokens)
      .def_rw("stop_token_ids", &Request::stop_token_ids)
      .def_rw("sampling", &Request::sampling)
      .def_rw("speculative", &Request::speculative)
      .def_rw("output", &Request::output);
  pickle(request, &Request::prompt_token_ids, &Request::max_tokens, &Request::stop_token_ids,
         &Request::sampling, &Request::speculative, &Request::output);
}

void bind_response(nb::module_& m) {
  nb::class_<RequestStatistics> statistics(m, "RequestStatistics", "Counts of one request so far.");
  statistics.def_ro("prefill_forwards", &RequestStatistics::prefill_forwards)
      .def_ro("verify_forwards", &RequestStatistics::verify_forwards)
      .def_ro("drafted_tokens", &RequestStatistics::drafted_tokens)
      .def_ro("accepted_tokens", &RequestStatistics::accepted_tokens)
      .def_ro("decoded_tokens", &RequestStatistics::decoded_tokens)
      .def_ro("cached_tokens", &RequestStatistics::cached_tokens)
      .def_ro("preemptions", &RequestStatistics::preemptions)
      .def_ro("queue_seconds", &RequestStatistics::queue_seconds)
      .def_ro("inexact_tree_state", &RequestStatistics::inexact_tree_state)
      .def_prop_ro("target_forwards", &RequestStatistics::target_forwards)
      .def_prop_ro("acceptance_length", &RequestStatistics::acceptance_length);
  pickle(statistics, &RequestStatistics::prefill_forwards, &RequestStatistics::verify_forwards,
         &RequestStatistics::drafted_tokens, &RequestStatistics::accepted_tokens,
         &RequestStatistics::decoded_tokens, &RequestStatistics::cached_tokens,
         &RequestStatistics::preemptions, &RequestStatistics::queue_seconds,
         &RequestStatistics::inexact_tree_state);

  nb::class_<TokenLogProbs> log_probs(
      m, "TokenLogProbs", "A token's log-prob, its rank and the most probable alternatives.");
  log_probs.def_ro("log_prob", &TokenLogProbs::log_prob)
      .def_ro("rank", &TokenLogProbs::rank)
      .def_ro("top", &TokenLogProbs::top);
  pickle(log_probs, &TokenLogProbs::log_prob, &TokenLogProbs::rank, &TokenLogProbs::top);

  nb::class_<Response> response(m, "Response",
                                "New tokens of one request, and how it ended if it did.");
  response.def_ro("request_id", &Response::request_id)
      .def_ro("token_ids", &Response::token_ids)
      .def_ro("finish_reason", &Response::finish_reason)
      .def_ro("statistics", &Response::statistics)
      .def_ro("log_probs", &Response::log_probs)
      .def_ro("prompt_log_probs", &Response::prompt_log_probs)
      .def_prop_ro("finished", &Response::finished);
  pickle(response, &Response::request_id, &Response::token_ids, &Response::finish_reason,
         &Response::statistics, &Response::log_probs, &Response::prompt_log_probs);
}

void bind_round_record(nb::module_& m) {
  nb::class_<RoundRecord> record(m, "RoundRecord",
                                 "One request's part in one round, for traces; seconds of draft, "
                                 "step and accept are the whole round's.");
  record.def_ro("round", &RoundRecord::round)
      .def_ro("request_id", &RoundRecord::request_id)
      .def_ro("prefill", &RoundRecord::prefill)
      .def_ro("committed_length", &RoundRecord::committed_length)
      .def_ro("token_ids", &RoundRecord::token_ids)
      .def_ro("parents", &RoundRecord::parents)
      .def_ro("accepted", &RoundRecord::accepted)
      .def_ro("emitted_tokens", &RoundRecord::emitted_tokens)
      .def_ro("extends_drafter", &RoundRecord::extends_drafter)
      .def_ro("tree_budget", &RoundRecord::tree_budget)
      .def_ro("queue_seconds", &RoundRecord::queue_seconds)
      .def_ro("draft_seconds", &RoundRecord::draft_seconds)
      .def_ro("step_seconds", &RoundRecord::step_seconds)
      .def_ro("accept_seconds", &RoundRecord::accept_seconds)
      .def_ro("step_rows", &RoundRecord::step_rows)
      .def_ro("step_requests", &RoundRecord::step_requests);
  pickle(record, &RoundRecord::round, &RoundRecord::request_id, &RoundRecord::prefill,
         &RoundRecord::committed_length, &RoundRecord::token_ids, &RoundRecord::parents,
         &RoundRecord::accepted, &RoundRecord::emitted_tokens, &RoundRecord::extends_drafter,
         &RoundRecord::tree_budget, &RoundRecord::queue_seconds, &RoundRecord::draft_seconds,
         &RoundRecord::step_seconds, &RoundRecord::accept_seconds, &RoundRecord::step_rows,
         &RoundRecord::step_requests);
}

}  // namespace

void bind_requests(nb::module_& m) {
  bind_enums(m);
  bind_sampling(m);
  bind_speculation(m);
  bind_request(m);
  bind_response(m);
  bind_round_record(m);
}

}  // namespace trtree
