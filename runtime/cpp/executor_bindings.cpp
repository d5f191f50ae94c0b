// The executor, seen from Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <type_traits>

#include "runtime/cpp/executor.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

namespace {

void bind_config(nb::module_& m) {
  nb::class_<KvCacheConfig>(m, "KvCacheConfig",
                            "enable_block_reuse: keep pages of finished requests for later ones "
                            "that begin with the same tokens (paged KV only). snapshot_interval: "
                            "tokens between snapshots of recurrent state.")
      .def(
          "__init__",
          [](KvCacheConfig* self, bool enable_block_reuse, int32_t snapshot_interval) {
            new (self) KvCacheConfig{enable_block_reuse, snapshot_interval};
          },
          "enable_block_reuse"_a = true, "snapshot_interval"_a = KvCacheConfig{}.snapshot_interval)
      .def_rw("enable_block_reuse", &KvCacheConfig::enable_block_reuse)
      .def_rw("snapshot_interval", &KvCacheConfig::snapshot_interval);

  nb::enum_<CapacitySchedulerPolicy>(m, "CapacitySchedulerPolicy")
      .value("MAX_UTILIZATION", CapacitySchedulerPolicy::kMaxUtilization)
      .value("GUARANTEED_NO_EVICT", CapacitySchedulerPolicy::kGuaranteedNoEvict);

  nb::class_<SchedulerConfig>(m, "SchedulerConfig",
                              "MAX_UTILIZATION admits early and pre-empts when pages run out; "
                              "GUARANTEED_NO_EVICT reserves all pages a request can need.")
      .def(
          "__init__",
          [](SchedulerConfig* self, CapacitySchedulerPolicy policy) {
            new (self) SchedulerConfig{policy};
          },
          "capacity_scheduler_policy"_a = CapacitySchedulerPolicy::kMaxUtilization)
      .def_rw("capacity_scheduler_policy", &SchedulerConfig::capacity_scheduler_policy);

  nb::class_<ExecutorConfig>(m, "ExecutorConfig",
                             "medusa_choices: rank paths of the engine's static tree, if any. "
                             "max_queue_size: requests that wait, 0 for any number. "
                             "load_rows: of a step, for BudgetPolicy.LOAD; 0 for two full trees. "
                             "cost_model: for BudgetPolicy.ADAPTIVE. "
                             "record_rounds: keep what take_rounds() returns.")
      .def(
          "__init__",
          [](ExecutorConfig* self, std::vector<std::vector<int32_t>> medusa_choices,
             bool allow_unsafe_tree_state, KvCacheConfig kv_cache_config,
             SchedulerConfig scheduler_config, int32_t max_queue_size, int32_t load_rows,
             std::optional<CostModel> cost_model, bool record_rounds) {
            new (self) ExecutorConfig{.medusa_choices = std::move(medusa_choices),
                                      .allow_unsafe_tree_state = allow_unsafe_tree_state,
                                      .kv_cache_config = kv_cache_config,
                                      .scheduler_config = scheduler_config,
                                      .max_queue_size = max_queue_size,
                                      .load_rows = load_rows,
                                      .cost_model = std::move(cost_model),
                                      .record_rounds = record_rounds};
          },
          "medusa_choices"_a = std::vector<std::vector<int32_t>>{},
          "allow_unsafe_tree_state"_a = false, "kv_cache_config"_a = KvCacheConfig{},
          "scheduler_config"_a = SchedulerConfig{}, "max_queue_size"_a = 0, "load_rows"_a = 0,
          "cost_model"_a = nb::none(), "record_rounds"_a = false)
      .def_rw("medusa_choices", &ExecutorConfig::medusa_choices)
      .def_rw("allow_unsafe_tree_state", &ExecutorConfig::allow_unsafe_tree_state)
      .def_rw("kv_cache_config", &ExecutorConfig::kv_cache_config)
      .def_rw("scheduler_config", &ExecutorConfig::scheduler_config)
      .def_rw("max_queue_size", &ExecutorConfig::max_queue_size)
      .def_rw("load_rows", &ExecutorConfig::load_rows)
      .def_rw("cost_model", &ExecutorConfig::cost_model)
      .def_rw("record_rounds", &ExecutorConfig::record_rounds);
}

void bind_statistics(nb::module_& m) {
  using S = ExecutorStatistics;
  nb::class_<S>(m, "ExecutorStatistics",
                "Counts since the executor began; active and queued requests, free and cached "
                "pages as of now.")
      .def("__getstate__", [](const S& self) { return nb::bytes(&self, sizeof(S)); })
      .def("__setstate__",
           [](S& self, const nb::bytes& state) {
             // Ranks of one program send them to each other: the struct's bytes will do.
             static_assert(std::is_trivially_copyable_v<S>);
             if (state.size() != sizeof(S))
               throw std::invalid_argument("not an ExecutorStatistics");
             new (&self) S{};
             std::memcpy(&self, state.data(), sizeof(S));
           })
      .def_ro("target_forwards", &S::target_forwards)
      .def_ro("drafter_forwards", &S::drafter_forwards)
      .def_ro("active_requests", &S::active_requests)
      .def_ro("queued_requests", &S::queued_requests)
      .def_ro("total_pages", &S::total_pages)
      .def_ro("prefix_cache", &S::prefix_cache)
      .def_ro("free_pages", &S::free_pages)
      .def_ro("cached_pages", &S::cached_pages)
      .def_ro("exact_tree_state", &S::exact_tree_state)
      .def_ro("total_snapshots", &S::total_snapshots)
      .def_ro("cached_snapshots", &S::cached_snapshots)
      .def_ro("snapshots_saved", &S::snapshots_saved)
      .def_ro("snapshots_loaded", &S::snapshots_loaded)
      .def_ro("finished_requests", &S::finished_requests)
      .def_ro("cancelled_requests", &S::cancelled_requests)
      .def_ro("preemptions", &S::preemptions)
      .def_ro("extended_tokens", &S::extended_tokens)
      .def_ro("drafter_catch_ups", &S::drafter_catch_ups)
      .def_ro("prompt_tokens", &S::prompt_tokens)
      .def_ro("cached_prompt_tokens", &S::cached_prompt_tokens)
      .def_ro("output_tokens", &S::output_tokens)
      .def_ro("verify_forwards", &S::verify_forwards)
      .def_ro("drafted_tokens", &S::drafted_tokens)
      .def_ro("accepted_tokens", &S::accepted_tokens)
      .def_ro("last_step_rows", &S::last_step_rows)
      .def_ro("last_step_requests", &S::last_step_requests)
      .def_ro("last_step_tree_nodes", &S::last_step_tree_nodes)
      .def_ro("max_step_requests", &S::max_step_requests);
}

}  // namespace

void bind_executor(nb::module_& m) {
  bind_config(m);
  bind_statistics(m);
  nb::exception<QueueFull>(m, "QueueFullError", PyExc_RuntimeError);

  nb::class_<Executor>(m, "Executor",
                       "In-flight batching over an Engine: requests of all kinds share each step.")
      .def(nb::init<Engine&, ExecutorConfig>(), "engine"_a, "config"_a = ExecutorConfig{},
           nb::keep_alive<1, 2>())
      .def("enqueue_request", &Executor::enqueue_request, "request"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Queue a request; returns its id. Raises ValueError for what the engine cannot do, "
           "QueueFullError, RuntimeError after shutdown.")
      .def("await_responses", &Executor::await_responses, "timeout_seconds"_a = 0.0,
           nb::call_guard<nb::gil_scoped_release>(),
           "Run rounds until some request has news. With no request left, wait for one as long "
           "as timeout_seconds, then return [].")
      .def("cancel_request", &Executor::cancel_request, "request_id"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "End a request before the next round; its last response says so.")
      .def("shutdown", &Executor::shutdown, nb::call_guard<nb::gil_scoped_release>(),
           "Take no more requests and end those there are; await_responses tells, and waits no "
           "more.")
      .def("take_rounds", &Executor::take_rounds, nb::call_guard<nb::gil_scoped_release>(),
           "RoundRecords since the last call, if the configuration records them.")
      .def("latest_statistics", &Executor::latest_statistics,
           nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace trtree
