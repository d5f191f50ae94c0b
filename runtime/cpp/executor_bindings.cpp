// Executor, requests and responses, seen from Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "runtime/cpp/executor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

namespace {

void bind_requests(nb::module_& m) {
  nb::enum_<DecodingMode>(m, "DecodingMode")
      .value("PLAIN", DecodingMode::kPlain)
      .value("CHAIN", DecodingMode::kChain)
      .value("TREE", DecodingMode::kTree);
  nb::enum_<TreeKind>(m, "TreeKind")
      .value("DYNAMIC", TreeKind::kDynamic)
      .value("STATIC", TreeKind::kStatic);
  nb::enum_<FinishReason>(m, "FinishReason")
      .value("NOT_FINISHED", FinishReason::kNotFinished)
      .value("STOP_TOKEN", FinishReason::kStopToken)
      .value("LENGTH", FinishReason::kLength)
      .value("CANCELLED", FinishReason::kCancelled);

  nb::class_<SamplingConfig>(m, "SamplingConfig", "How the target's choice is made at each row.")
      .def(
          "__init__",
          [](SamplingConfig* self, float temperature) { new (self) SamplingConfig{temperature}; },
          "temperature"_a = 0.0f)
      .def_rw("temperature", &SamplingConfig::temperature);

  nb::class_<SpeculativeConfig>(m, "SpeculativeConfig",
                                "What is drafted: nothing, a chain, or a tree of tree_budget "
                                "nodes besides the root. top_k 0: as many ranks per depth as "
                                "the budget can use.")
      .def(
          "__init__",
          [](SpeculativeConfig* self, DecodingMode mode, TreeKind tree, int32_t tree_budget,
             int32_t top_k) { new (self) SpeculativeConfig{mode, tree, tree_budget, top_k}; },
          "mode"_a = DecodingMode::kTree, "tree"_a = TreeKind::kDynamic, "tree_budget"_a = 16,
          "top_k"_a = 0)
      .def_rw("mode", &SpeculativeConfig::mode)
      .def_rw("tree", &SpeculativeConfig::tree)
      .def_rw("tree_budget", &SpeculativeConfig::tree_budget)
      .def_rw("top_k", &SpeculativeConfig::top_k);

  nb::class_<Request>(m, "Request", "One prompt to continue. A stop token is part of the output.")
      .def(
          "__init__",
          [](Request* self, std::vector<int32_t> prompt_token_ids, int32_t max_tokens,
             std::vector<int32_t> stop_token_ids, SamplingConfig sampling,
             SpeculativeConfig speculative) {
            new (self) Request{std::move(prompt_token_ids), max_tokens, std::move(stop_token_ids),
                               sampling, speculative};
          },
          "prompt_token_ids"_a, "max_tokens"_a = 128, "stop_token_ids"_a = std::vector<int32_t>{},
          "sampling"_a = SamplingConfig{}, "speculative"_a = SpeculativeConfig{})
      .def_rw("prompt_token_ids", &Request::prompt_token_ids)
      .def_rw("max_tokens", &Request::max_tokens)
      .def_rw("stop_token_ids", &Request::stop_token_ids)
      .def_rw("sampling", &Request::sampling)
      .def_rw("speculative", &Request::speculative);

  nb::class_<RequestStatistics>(m, "RequestStatistics", "Counts of one request so far.")
      .def_ro("prefill_forwards", &RequestStatistics::prefill_forwards)
      .def_ro("verify_forwards", &RequestStatistics::verify_forwards)
      .def_ro("drafted_tokens", &RequestStatistics::drafted_tokens)
      .def_ro("accepted_tokens", &RequestStatistics::accepted_tokens)
      .def_ro("decoded_tokens", &RequestStatistics::decoded_tokens)
      .def_prop_ro("target_forwards", &RequestStatistics::target_forwards)
      .def_prop_ro("acceptance_length", &RequestStatistics::acceptance_length);

  nb::class_<Response>(m, "Response", "New tokens of one request, and how it ended if it did.")
      .def_ro("request_id", &Response::request_id)
      .def_ro("token_ids", &Response::token_ids)
      .def_ro("finish_reason", &Response::finish_reason)
      .def_ro("statistics", &Response::statistics)
      .def_prop_ro("finished", &Response::finished);
}

}  // namespace

void bind_executor(nb::module_& m) {
  bind_requests(m);
  nb::class_<ExecutorConfig>(m, "ExecutorConfig",
                             "medusa_choices: rank paths of the engine's static tree, if any.")
      .def(
          "__init__",
          [](ExecutorConfig* self, std::vector<std::vector<int32_t>> medusa_choices,
             bool allow_unsafe_tree_state) {
            new (self) ExecutorConfig{std::move(medusa_choices), allow_unsafe_tree_state};
          },
          "medusa_choices"_a = std::vector<std::vector<int32_t>>{},
          "allow_unsafe_tree_state"_a = false)
      .def_rw("medusa_choices", &ExecutorConfig::medusa_choices)
      .def_rw("allow_unsafe_tree_state", &ExecutorConfig::allow_unsafe_tree_state);

  nb::class_<ExecutorStatistics>(m, "ExecutorStatistics", "Counts since the executor began.")
      .def_ro("target_forwards", &ExecutorStatistics::target_forwards)
      .def_ro("drafter_forwards", &ExecutorStatistics::drafter_forwards)
      .def_ro("active_requests", &ExecutorStatistics::active_requests)
      .def_ro("queued_requests", &ExecutorStatistics::queued_requests)
      .def_ro("free_pages", &ExecutorStatistics::free_pages);

  nb::class_<Executor>(m, "Executor",
                       "In-flight batching over an Engine: requests of all kinds share each step.")
      .def(nb::init<Engine&, ExecutorConfig>(), "engine"_a, "config"_a = ExecutorConfig{},
           nb::keep_alive<1, 2>())
      .def("enqueue_request", &Executor::enqueue_request, "request"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Queue a request; returns its id. Raises ValueError for what the engine cannot do.")
      .def("await_responses", &Executor::await_responses, nb::call_guard<nb::gil_scoped_release>(),
           "Run rounds until some request has news; [] once none is left.")
      .def("cancel_request", &Executor::cancel_request, "request_id"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "End a request before the next round; its last response says so.")
      .def("latest_statistics", &Executor::latest_statistics,
           nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace trtree
