// trtree._core.sampler: the sampler as the tests see it; the executor calls it in C++.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

#include "runtime/cpp/exp_weights.hpp"
#include "runtime/cpp/philox.hpp"
#include "runtime/cpp/sampler.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const float> span(const Logits& logits) { return {logits.data(), logits.size()}; }

}  // namespace

void bind_sampler(nb::module_& parent) {
  nb::module_ m = parent.def_submodule("sampler", "The target's choices; see sampler.hpp.");

  nb::class_<TokenCounts>(m, "TokenCounts")
      .def(
          "__init__",
          [](TokenCounts* self, const std::vector<int32_t>& prompt) {
            new (self) TokenCounts(prompt);
          },
          "prompt"_a = std::vector<int32_t>{})
      .def("add", &TokenCounts::add, "token"_a)
      .def("take_back", &TokenCounts::take_back, "token"_a);

  m.def("check_sampling", &check_sampling, "config"_a, "vocab_size"_a);
  m.def(
      "choose",
      [](const Logits& logits, const SamplingConfig& config, const TokenCounts& counts,
         int64_t position) { return choose(span(logits), config, counts, position); },
      "logits"_a, "config"_a, "counts"_a, "position"_a);
  m.def(
      "choose_at",
      [](const Logits& logits, const SamplingConfig& config, const TokenCounts& counts,
         const std::vector<int64_t>& positions) {
        std::vector<int32_t> choices;
        for (const int64_t position : positions) {
          choices.push_back(choose(span(logits), config, counts, position));
        }
        return choices;
      },
      "logits"_a, "config"_a, "counts"_a, "positions"_a, "choose() at each of the positions.");
  m.def(
      "distribution",
      [](const Logits& logits, const SamplingConfig& config, const TokenCounts& counts) {
        return distribution(span(logits), config, counts);
      },
      "logits"_a, "config"_a, "counts"_a);
  m.def(
      "log_probs",
      [](const Logits& logits, int32_t token, int32_t top) {
        return log_probs(span(logits), token, top);
      },
      "logits"_a, "token"_a, "top"_a);

  m.def("philox4x32", &philox4x32, "counter"_a, "key"_a);
  m.def("uniform", &uniform, "seed"_a, "position"_a);
  m.def(
      "exp_weights",
      [](const Logits& logits, double max, double scale) {
        using Result = std::tuple<std::string, std::vector<double>, std::vector<double>>;
        std::vector<Result> results;
        const auto count = static_cast<int32_t>(logits.size());
        for (const ExpKernel& kernel : exp_kernels()) {
          std::vector<double> weights(logits.size());
          std::vector<double> sums((logits.size() + kWeightChunk - 1) / kWeightChunk);
          kernel.weights(logits.data(), count, max, scale, weights.data());
          kernel.sums(logits.data(), count, max, scale, sums.data());
          results.emplace_back(kernel.name, std::move(weights), std::move(sums));
        }
        return results;
      },
      "logits"_a, "max"_a, "scale"_a,
      "(name, weights, sums of chunks) by each kernel that this processor can run.");
}

}  // namespace trtree
