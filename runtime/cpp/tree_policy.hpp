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
  int32_t requests = 1;       // that draft and share the choice; a root row each
  int32_t other_rows = 0;     // of prompt chunks, requests that do not draft, fixed trees
  double mean_context = 0.0;  // committed tokens per request
  int32_t max_nodes = std::numeric_limits<int32_t>::max();  // over all requests
  int32_t other_requests = 0;  // in work besides: each brings a token a round, now or soon
};

// BudgetPolicy::kAdaptive: CaDDTree (arXiv 2606.01813), with one choice for all requests of
// a round. A node is worth the probability that it is accepted; nodes are taken in order of
// worth, over all requests, as long as they raise
//   (tokens expected) / (C_draft(requests) + C_verify(rows) + C_extend(tokens expected)).
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
//
// Requests that do not draft need no drafter context, and save C_extend at every commit. So
// whether to draft is no question of a round alone: phase() answers it for the load.
class AdaptiveBudget {
 public:
  enum class Phase {
    kLearning,  // draft: too few trees were seen to know
    kDrafting,  // draft: it pays
    kPlain,     // it does not, but for probes
  };

  // Throws std::invalid_argument for costs without verification.
  explicit AdaptiveBudget(CostModel costs);

  // What requests are to do at this load; to be asked once a round. `load` is that of all
  // adaptive requests drafting, without prompt chunks. Drafting begins where it is expected to
  // bring kMargin more tokens per second than none, and ends where it brings fewer. kPlain,
  // before anything is learnt, where even a chain of which all is accepted would not pay.
  Phase phase(const RoundLoad& load);

  // Whether a drafter pass is expected to pay in a round that holds prompt chunks too.
  bool pays(const RoundLoad& load) const { return expected(load).gain > 0.0; }

  // Seconds that drafting, with the drafter's context it needs, saves per token at this load; 0
  // or less where it does not pay.
  double seconds_saved(const RoundLoad& load) const;

  // Whether one request should draft kProbeTrees trees although the phase is kPlain, so that no
  // verdict is for ever: after kProbeInterval rounds, or more where `seconds`, what the probe
  // costs, is above kProbeShare of what they took. Never where nothing could make drafting pay.
  bool probe_due(double seconds) const;
  // Seconds of a probe by one of load's requests, which has to run `missing_tokens` of its own
  // again, and to extend the drafter's context by `extended_tokens`, before it can draft.
  double probe_seconds(const RoundLoad& load, int32_t missing_tokens,
                       int32_t extended_tokens) const;
  void begin_probe();
  // Seconds of running tokens again, in a round that there is anyway.
  double rerun_seconds(const RoundLoad& load, int32_t tokens) const;

  // How many of its nodes each tree keeps. load.requests may exceed the trees: the rest
  // drafted nothing. `least`: of each tree, if there are rows for it. Throws
  // std::invalid_argument for a tree without log_probs.
  std::vector<int32_t> choose(const RoundLoad& load, std::span<const ddtree::Tree* const> trees,
                              int32_t least = 0);

  // A tree as it was verified, and how many of its nodes were accepted.
  void observe(const ddtree::Tree& tree, int32_t accepted);

  // Of worths at a depth, from 1.
  double correction(int32_t depth) const;

  static constexpr double kMargin = 0.02;
  static constexpr int32_t kProbeTrees = 8;
  static constexpr int32_t kProbeInterval = 64;
  static constexpr double kProbeShare = 0.01;

 private:
  struct Outcome {
    size_t nodes;
    double gain;   // tokens, less the time of nodes, drafting and extending at the best ratio
    double price;  // that ratio: tokens per second
  };

  Outcome best(const RoundLoad& load, std::span<const double> worths) const;
  Outcome expected(const RoundLoad& load) const;
  Phase judge(const RoundLoad& load);
  std::vector<double> worths(const ddtree::Tree& tree) const;
  void remember(std::span<const std::vector<double>> trees);

  CostModel costs_;
  std::vector<double> profile_;   // worth of a tree's n-th node, decayed mean
  double trees_seen_ = 0.0;       // that the mean is of
  std::vector<double> expected_;  // nodes accepted by depth, decayed sums
  std::vector<double> accepted_;
  Phase phase_ = Phase::kLearning;
  RoundLoad judged_{.requests = 0};  // the load of that verdict
  int32_t verdict_age_ = 0;          // rounds
  bool could_pay_ = true;            // if all of a chain were accepted
  int32_t plain_rounds_ = 0;         // since the last probe
  double plain_seconds_ = 0.0;       // that they cost
};

}  // namespace trtree
