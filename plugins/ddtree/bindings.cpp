// trtree._core.ddtree: what plugins/ddtree/__init__.py checks and documents.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>

#include "plugins/ddtree/ddtree.hpp"
#include "plugins/ddtree/row_scan.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

namespace {

template <typename T, size_t kDims>
using Input = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Output = nb::ndarray<nb::numpy, T>;

template <typename Array>
auto span(const Array& array) {
  return std::span(array.data(), array.size());
}

template <typename Array>
int32_t extent(const Array& array, size_t axis) {
  return static_cast<int32_t>(array.shape(axis));
}

// Hands the values to NumPy without a copy.
template <typename T>
Output<T> array(std::vector<T> values, std::initializer_list<size_t> shape) {
  auto owned = std::make_unique<std::vector<T>>(std::move(values));
  T* const data = owned->data();
  nb::capsule owner(owned.release(),
                    [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Output<T>(data, shape, owner);
}

template <typename T>
Output<const T> view(const std::vector<T>& values, nb::handle owner) {
  return Output<const T>(values.data(), {values.size()}, owner);
}

struct TopK {
  int32_t depth;
  int32_t top_k;
  std::vector<float> log_probs;
  std::vector<int32_t> token_ids;
};

TopK rank(const Input<float, 2>& logits, int32_t top_k, int32_t num_threads) {
  const int32_t depth = extent(logits, 0);
  const size_t size = size_t(depth) * std::max(top_k, 0);
  TopK out{depth, top_k, std::vector<float>(size), std::vector<int32_t>(size)};
  ddtree::top_k_log_probs(span(logits), depth, extent(logits, 1), top_k, num_threads, out.log_probs,
                          out.token_ids);
  return out;
}

// A read-only view of one of the tree's vectors.
template <typename T>
auto view_of(std::vector<T> ddtree::Tree::*member) {
  return [member](nb::handle_t<ddtree::Tree> self) {
    return view(nb::cast<const ddtree::Tree&>(self).*member, self);
  };
}

void bind_tree(nb::module_& m) {
  nb::class_<ddtree::Tree>(m, "Tree")
      .def_prop_ro("token_ids", view_of(&ddtree::Tree::token_ids))
      .def_prop_ro("depths", view_of(&ddtree::Tree::depths))
      .def_prop_ro("parents", view_of(&ddtree::Tree::parents))
      .def_prop_ro("log_probs", view_of(&ddtree::Tree::log_probs))
      .def(
          "first",
          [](ddtree::Tree tree, int32_t nodes) {
            tree.keep_first(nodes);
            return tree;
          },
          "nodes"_a)
      .def("packed_mask",
           [](const ddtree::Tree& tree) {
             const size_t rows = tree.parents.size();
             return array(tree.packed_mask(), {rows, (rows + 31) / 32});
           })
      .def(
          "walk",
          [](const ddtree::Tree& tree, const Input<int32_t, 1>& choices) {
            ddtree::Walk walk = ddtree::walk(tree, span(choices));
            const size_t n = walk.accepted.size();
            return std::pair(array(std::move(walk.accepted), {n}), walk.bonus);
          },
          "choices"_a);
}

void bind_top_k(nb::module_& m) {
  m.def(
      "top_k_log_probs",
      [](const Input<float, 2>& logits, int32_t top_k, int32_t num_threads) {
        TopK out;
        {
          const nb::gil_scoped_release release;
          out = rank(logits, top_k, num_threads);
        }
        const size_t depth = out.depth;
        const size_t k = out.top_k;
        return std::pair(array(std::move(out.log_probs), {depth, k}),
                         array(std::move(out.token_ids), {depth, k}));
      },
      "logits"_a, "top_k"_a, "num_threads"_a);

  m.def(
      "scan_row",
      [](const Input<float, 1>& logits) {
        std::vector<std::pair<std::string, std::pair<float, double>>> results;
        std::vector<float> chunk_max(logits.size() / ddtree::kChunk + 1);
        for (const auto& kernel : ddtree::scan_kernels()) {
          const auto row = kernel.scan(logits.data(), extent(logits, 0), chunk_max.data());
          results.push_back({kernel.name, {row.max, row.sum}});
        }
        return results;
      },
      "logits"_a, "(name, (max, sum)) by each kernel that this processor can run.");
}

void bind_builders(nb::module_& m) {
  m.def(
      "build_tree",
      [](const Input<float, 2>& logits, int32_t budget, int32_t top_k, int32_t num_threads,
         bool chain_seed) {
        const TopK ranked = rank(logits, top_k, num_threads);
        return ddtree::build_tree(ranked.log_probs, ranked.token_ids, ranked.depth, top_k, budget,
                                  chain_seed);
      },
      "logits"_a, "budget"_a, "top_k"_a, "num_threads"_a, "chain_seed"_a,
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "build_tree_from_top_k",
      [](const Input<float, 2>& log_probs, const Input<int32_t, 2>& token_ids, int32_t budget,
         bool chain_seed) {
        return ddtree::build_tree(span(log_probs), span(token_ids), extent(log_probs, 0),
                                  extent(log_probs, 1), budget, chain_seed);
      },
      "log_probs"_a, "token_ids"_a, "budget"_a, "chain_seed"_a,
      nb::call_guard<nb::gil_scoped_release>());

  m.def(
      "chain", [](const Input<int32_t, 1>& token_ids) { return ddtree::chain(span(token_ids)); },
      "token_ids"_a);

  m.def(
      "static_tree",
      [](const std::vector<std::vector<int32_t>>& choices, const Input<int32_t, 2>& token_ids) {
        return ddtree::static_tree(choices, span(token_ids), extent(token_ids, 0),
                                   extent(token_ids, 1));
      },
      "choices"_a, "token_ids"_a);
}

}  // namespace

void bind_ddtree(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("ddtree", "Draft trees; see plugins/ddtree/README.md.");
  bind_tree(m);
  bind_top_k(m);
  bind_builders(m);
}

}  // namespace trtree
