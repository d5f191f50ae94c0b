// Costs and tree policies, seen from Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "runtime/cpp/tree_policy.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

void bind_tree_policy(nb::module_& m) {
  using Points = std::vector<std::pair<double, double>>;
  nb::class_<CostModel>(m, "CostModel",
                        "Seconds of a target pass by rows and of a drafter pass by requests, "
                        "through measured (size, seconds) points made non-decreasing and convex; "
                        "row_context_seconds: a row's for each committed token before it; "
                        "extend: of extending the drafter's context, by committed rows.")
      .def(
          "__init__",
          [](CostModel* self, Points verify, Points draft, double row_context_seconds,
             Points extend) {
            new (self) CostModel{CostCurve(std::move(verify)), CostCurve(std::move(draft)),
                                 row_context_seconds, CostCurve(std::move(extend))};
          },
          "verify"_a, "draft"_a = Points{}, "row_context_seconds"_a = 0.0, "extend"_a = Points{})
      .def("verify_seconds", &CostModel::verify_seconds, "rows"_a, "mean_context"_a = 0.0)
      .def(
          "draft_seconds",
          [](const CostModel& self, double requests) { return self.draft(requests); }, "requests"_a)
      .def(
          "extend_seconds", [](const CostModel& self, double rows) { return self.extend(rows); },
          "rows"_a);

  nb::module_ policy = m.def_submodule("tree_policy", "Tree policies; see tree_policy.hpp.");
  nb::class_<RoundLoad>(policy, "RoundLoad")
      .def(
          "__init__",
          [](RoundLoad* self, int32_t requests, int32_t other_rows, double mean_context,
             int32_t max_nodes, int32_t other_requests) {
            new (self) RoundLoad{requests, other_rows, mean_context, max_nodes, other_requests};
          },
          "requests"_a, "other_rows"_a = 0, "mean_context"_a = 0.0,
          "max_nodes"_a = RoundLoad{}.max_nodes, "other_requests"_a = 0);
  nb::enum_<AdaptiveBudget::Phase>(policy, "Phase")
      .value("LEARNING", AdaptiveBudget::Phase::kLearning)
      .value("DRAFTING", AdaptiveBudget::Phase::kDrafting)
      .value("PLAIN", AdaptiveBudget::Phase::kPlain);
  nb::class_<AdaptiveBudget>(policy, "AdaptiveBudget")
      .def(nb::init<CostModel>(), "costs"_a)
      .def("phase", &AdaptiveBudget::phase, "load"_a)
      .def("pays", &AdaptiveBudget::pays, "load"_a)
      .def("seconds_saved", &AdaptiveBudget::seconds_saved, "load"_a)
      .def("probe_due", &AdaptiveBudget::probe_due, "seconds"_a)
      .def("probe_seconds", &AdaptiveBudget::probe_seconds, "load"_a, "missing_tokens"_a,
           "extended_tokens"_a)
      .def("begin_probe", &AdaptiveBudget::begin_probe)
      .def("rerun_seconds", &AdaptiveBudget::rerun_seconds, "load"_a, "tokens"_a)
      .def(
          "choose",
          [](AdaptiveBudget& self, const RoundLoad& load,
             const std::vector<const ddtree::Tree*>& trees,
             int32_t least) { return self.choose(load, trees, least); },
          "load"_a, "trees"_a, "least"_a = 0)
      .def("observe", &AdaptiveBudget::observe, "tree"_a, "accepted"_a)
      .def("correction", &AdaptiveBudget::correction, "depth"_a)
      .def_prop_ro_static("PROBE_INTERVAL",
                          [](nb::handle) { return AdaptiveBudget::kProbeInterval; })
      .def_prop_ro_static("PROBE_TREES", [](nb::handle) { return AdaptiveBudget::kProbeTrees; });
  policy.def("under_load", &under_load, "config"_a, "capabilities"_a, "requests"_a, "max_rows"_a);
  policy.def("default_load_rows", &default_load_rows, "capabilities"_a);
}

}  // namespace trtree
