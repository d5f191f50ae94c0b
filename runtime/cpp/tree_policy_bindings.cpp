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
                        "row_context_seconds: a row's for each committed token before it.")
      .def(
          "__init__",
          [](CostModel* self, Points verify, Points draft, double row_context_seconds) {
            new (self) CostModel{CostCurve(std::move(verify)), CostCurve(std::move(draft)),
                                 row_context_seconds};
          },
          "verify"_a, "draft"_a = Points{}, "row_context_seconds"_a = 0.0)
      .def("verify_seconds", &CostModel::verify_seconds, "rows"_a, "mean_context"_a = 0.0)
      .def(
          "draft_seconds",
          [](const CostModel& self, double requests) { return self.draft(requests); },
          "requests"_a);

  nb::module_ policy = m.def_submodule("tree_policy", "Tree policies; see tree_policy.hpp.");
  nb::class_<RoundLoad>(policy, "RoundLoad")
      .def(
          "__init__",
          [](RoundLoad* self, int32_t requests, int32_t other_rows, double mean_context,
             int32_t max_nodes) {
            new (self) RoundLoad{requests, other_rows, mean_context, max_nodes};
          },
          "requests"_a, "other_rows"_a = 0, "mean_context"_a = 0.0,
          "max_nodes"_a = RoundLoad{}.max_nodes);
  nb::class_<AdaptiveBudget>(policy, "AdaptiveBudget")
      .def(nb::init<CostModel>(), "costs"_a)
      .def("should_draft", &AdaptiveBudget::should_draft, "load"_a)
      .def(
          "choose",
          [](AdaptiveBudget& self, const RoundLoad& load,
             const std::vector<const ddtree::Tree*>& trees) { return self.choose(load, trees); },
          "load"_a, "trees"_a)
      .def("observe", &AdaptiveBudget::observe, "tree"_a, "accepted"_a)
      .def("correction", &AdaptiveBudget::correction, "depth"_a)
      .def_prop_ro_static("PROBE_INTERVAL",
                          [](nb::handle) { return AdaptiveBudget::kProbeInterval; });
  policy.def("under_load", &under_load, "config"_a, "capabilities"_a, "requests"_a, "max_rows"_a);
  policy.def("default_load_rows", &default_load_rows, "capabilities"_a);
}

}  // namespace trtree
