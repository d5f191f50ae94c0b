// How large draft trees are, by load. Trees are lossless at any size, so none of this can
// change what is said, only how fast.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "plugins/ddtree/ddtree.hpp"
#include "runtime/cpp/cost_model.hpp"
#include "runtime/cpp/engine.hpp"
#include "runtime/cpp/request.hpp"

namespace trtree {

// BudgetPolicy::kLoad: what a request drafts in a round with `requests` decoding requests
// whose roots and nodes are to fit in `max_rows` rows. With n = max_rows / requests - 1
// (rounded down), that is
// - `config` itself, if n nodes are enough for it;
// - a dynamic tree of n nodes, if that is more than the drafter's chain has;
// - the chain's first n nodes, where a tree that small would have to give up some of them;
// - nothing, if n is 0.
// So rows stay within max_rows as long as roots alone do, and a request never drafts more
// when there are more requests.
SpeculativeConfig under_load(const SpeculativeConfig& config, const Capabilities& capabilities,
                             int32_t requests, int32_t max_rows);

// max_rows where none is configured: two full trees, which leaves a lone request its own.
int32_t default_load_rows(const Capabilities& capabilities);

// What a round holds beside the nodes to choose.
struct RoundLoad {
  int32_t requests = 1;       // that share the choice; a root row each
  int32_t other_rows = 0;     // of prompt chunks, plain requests, trees of fixed size
  double mean_context = 0.0;  // committed tokens per request
  int32_t max_nodes = std::numeric_limits<int32_t>::max();  // over all requests
};

// BudgetPolicy::kAdaptive: CaDDTree (arXiv 2606.01813), with one choice for all requests of
// a round. A node is worth the probability that it is accepted; nodes are taken in order of
// worth, over all requests, as long as they raise
//   (tokens expected) / (C_draft(requests) + C_verify(rows)).
// Costs are convex and worths taken in decreasing order, so that ratio has one maximum. In
// a round with other rows, what those cost is due anyway; there a node has to be worth its
// own time at the best ratio found without them.
//
// The worth of a node is its path's probability under the drafter, which takes each depth's
// marginal as independent of the path, times a correction of its depth: nodes accepted over
// nodes expected, in decayed sums over what was verified.
//
// A tree's nodes are kept from the first on, which leaves the tree of a smaller budget;
// where worths do not fall along them (a chain seed, corrections), stretches that rise
// are taken at their mean.
class AdaptiveBudget {
 public:
  // Throws std::invalid_argument for costs without verification.
  explicit AdaptiveBudget(CostModel costs);

  // Whether a drafter pass is expected to pay for itself, from the worths of recent trees. Also
  // true for the first trees, from which corrections are learnt, and now and then (a probe), so
  // that no verdict is for ever: after kProbeInterval calls, or more where so few rounds cost
  // little against a drafter pass, which is to take kProbeShare of the time. Never where even a
  // chain of which all is accepted would not pay, or no row is left for a node.
  bool should_draft(const RoundLoad& load);

  // How many of its nodes each tree keeps. load.requests may exceed the trees: the rest
  // drafted nothing. Throws std::invalid_argument for a tree without log_probs.
  std::vector<int32_t> choose(const RoundLoad& load, std::span<const ddtree::Tree* const> trees);

  // A tree as it was verified, and how many of its nodes were accepted.
  void observe(const ddtree::Tree& tree, int32_t accepted);

  // Of worths at a depth, from 1.
  double correction(int32_t depth) const;

  static constexpr int32_t kProbeInterval = 64;
  static constexpr double kProbeShare = 0.01;

 private:
  struct Outcome {
    size_t nodes;
    double gain;  // tokens, less the time of nodes and drafting at the best ratio
  };

  Outcome best(const RoundLoad& load, std::span<const double> worths) const;
  std::vector<double> worths(const ddtree::Tree& tree) const;
  void remember(std::span<const std::vector<double>> trees);

  CostModel costs_;
  std::vector<double> profile_;   // worth of a tree's n-th node, decayed mean
  double trees_seen_ = 0.0;       // that the mean is of
  std::vector<double> expected_;  // nodes accepted by depth, decayed sums
  std::vector<double> accepted_;
  int32_t rounds_without_ = 0;    // since the last draft
  double seconds_without_ = 0.0;  // that they cost
};

}  // namespace trtree
