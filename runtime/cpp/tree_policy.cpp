#include "runtime/cpp/tree_policy.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "runtime/cpp/isotonic.hpp"

namespace trtree {

namespace {

// The memory of the sums of accepted and expected nodes, and of the mean worths, in trees.
constexpr double kMemory = 128.0;
// Trees from which worths are known well enough to judge by.
constexpr double kLearntFrom = 32.0;
// Rounds after which a verdict is looked at again although the load is what it was: contexts
// grow, and acceptance drifts, slowly. Judging takes longer than all else of the policy.
constexpr int32_t kVerdictRounds = 16;
// Nodes that a depth without observations counts as expected, with the correction of the
// depth above it.
constexpr double kPrior = 1.0;
constexpr double kMaxCorrection = 4.0;
// Nodes of a chain that are accepted at the very best.
constexpr size_t kLongestDraft = 15;

std::vector<double> falling(const std::vector<double>& worths) {
  return non_increasing_fit(worths, std::vector<double>(worths.size(), 1.0));
}

}  // namespace

SpeculativeConfig under_load(const SpeculativeConfig& config, const Capabilities& capabilities,
                             int32_t requests, int32_t max_rows) {
  if (config.mode == DecodingMode::kPlain) return config;
  const int32_t chain =
      std::max(0, std::min(capabilities.block_size, capabilities.verify_width) - 1);
  const int32_t wanted = config.mode == DecodingMode::kChain ? chain : config.tree_budget;
  const int32_t rows = std::min(max_rows, capabilities.max_num_rows);
  const int32_t nodes = std::max(0, rows / std::max(1, requests) - 1);
  if (wanted <= nodes) return config;

  SpeculativeConfig smaller = config;
  smaller.mode = nodes == 0 ? DecodingMode::kPlain : DecodingMode::kTree;
  smaller.tree = TreeKind::kDynamic;
  smaller.tree_budget = nodes;
  if (nodes <= chain) {
    smaller.top_k = 1;
    smaller.chain_seed = true;
  }
  return smaller;
}

int32_t default_load_rows(const Capabilities& capabilities) {
  return std::min(capabilities.max_num_rows, 2 * capabilities.verify_width);
}

AdaptiveBudget::AdaptiveBudget(CostModel costs) : costs_(std::move(costs)) {
  if (!(costs_.verify(1.0) > 0.0)) {
    throw std::invalid_argument(
        "an adaptive budget needs the cost of verifying; measure it with "
        "python -m trtree.runtime.calibrate");
  }
}

AdaptiveBudget::Phase AdaptiveBudget::phase(const RoundLoad& load) {
  const bool same = load.requests == judged_.requests && load.other_rows == judged_.other_rows &&
                    load.other_requests == judged_.other_requests &&
                    (load.max_nodes > 0) == (judged_.max_nodes > 0);
  if (!same || phase_ == Phase::kLearning || ++verdict_age_ >= kVerdictRounds) {
    phase_ = judge(load);
    judged_ = load;
    verdict_age_ = 0;
  }
  if (phase_ == Phase::kPlain) {
    ++plain_rounds_;
    plain_seconds_ += costs_.verify_seconds(load.requests + load.other_rows, load.mean_context);
  }
  return phase_;
}

AdaptiveBudget::Phase AdaptiveBudget::judge(const RoundLoad& load) {
  const std::vector<double> all_accepted(kLongestDraft * std::max(1, load.requests), 1.0);
  could_pay_ = best(load, all_accepted).gain > 0.0;
  if (!could_pay_) return Phase::kPlain;
  if (trees_seen_ < kLearntFrom) return Phase::kLearning;
  const double needed =
      phase_ == Phase::kDrafting ? 0.0 : kMargin * (load.requests + load.other_requests);
  return expected(load).gain > needed ? Phase::kDrafting : Phase::kPlain;
}

// Of trees as they have been of late.
AdaptiveBudget::Outcome AdaptiveBudget::expected(const RoundLoad& load) const {
  std::vector<double> worths;
  for (const double worth : falling(profile_)) {
    worths.insert(worths.end(), std::max(1, load.requests), worth);
  }
  return best(load, worths);
}

double AdaptiveBudget::seconds_saved(const RoundLoad& load) const {
  const Outcome outcome = expected(load);
  return outcome.gain / outcome.price / (load.requests + load.other_requests);
}

double AdaptiveBudget::rerun_seconds(const RoundLoad& load, int32_t tokens) const {
  const double due = load.requests + load.other_rows;
  return costs_.verify_seconds(due + tokens, load.mean_context) -
         costs_.verify_seconds(due, load.mean_context);
}

double AdaptiveBudget::probe_seconds(const RoundLoad& load, int32_t missing_tokens,
                                     int32_t extended_tokens) const {
  return rerun_seconds(load, missing_tokens) + costs_.extend(extended_tokens) +
         kProbeTrees * (costs_.draft(1) + rerun_seconds(load, 1) + costs_.extend(1));
}

bool AdaptiveBudget::probe_due(double seconds) const {
  return phase_ == Phase::kPlain && could_pay_ && plain_rounds_ >= kProbeInterval &&
         seconds <= kProbeShare * plain_seconds_;
}

void AdaptiveBudget::begin_probe() {
  plain_rounds_ = 0;
  plain_seconds_ = 0.0;
}

std::vector<int32_t> AdaptiveBudget::choose(const RoundLoad& load,
                                            std::span<const ddtree::Tree* const> trees,
                                            int32_t least) {
  struct Node {
    double rank;  // its worth, or the mean of the stretch it belongs to
    double worth;
    size_t tree;
  };
  std::vector<Node> nodes;
  std::vector<std::vector<double>> all;
  for (size_t t = 0; t < trees.size(); ++t) {
    all.push_back(worths(*trees[t]));
    const std::vector<double> ranks = falling(all.back());
    for (size_t i = 0; i < ranks.size(); ++i) nodes.push_back({ranks[i], all.back()[i], t});
  }
  remember(all);
  // Stable: of equal nodes the earlier, so that what is kept of a tree are its first.
  std::stable_sort(nodes.begin(), nodes.end(),
                   [](const Node& a, const Node& b) { return a.rank > b.rank; });
  std::vector<double> sorted;
  for (const Node& node : nodes) sorted.push_back(node.worth);

  std::vector<int32_t> kept(trees.size());
  const size_t taken = best(load, sorted).nodes;
  for (size_t i = 0; i < taken; ++i) ++kept[nodes[i].tree];
  int32_t left = std::max(0, load.max_nodes) - static_cast<int32_t>(taken);
  for (size_t t = 0; t < trees.size(); ++t) {
    const int32_t wanted = std::min(least, static_cast<int32_t>(all[t].size()));
    const int32_t more = std::clamp(wanted - kept[t], 0, std::max(0, left));
    kept[t] += more;
    left -= more;
  }
  return kept;
}

// Of the first so many of `worths`, which all are worth most. The price of a second is the
// most tokens that a round of the requests in work alone can bring in one, drafting or not:
// that is what a longer round costs.
AdaptiveBudget::Outcome AdaptiveBudget::best(const RoundLoad& load,
                                             std::span<const double> worths) const {
  const size_t most = std::min<size_t>(worths.size(), std::max(0, load.max_nodes));
  const auto verify = [&](double rows) { return costs_.verify_seconds(rows, load.mean_context); };
  const double requests = load.requests;
  const double all = requests + load.other_requests;
  const double draft = costs_.draft(requests);
  double price = all / verify(all);
  double more = 0.0;  // tokens from nodes
  for (size_t n = 0; n <= most; ++n) {
    if (n > 0) more += worths[n - 1];
    const double seconds =
        draft + verify(all + static_cast<double>(n)) + costs_.extend(requests + more);
    price = std::max(price, (all + more) / seconds);
  }

  const double due = requests + load.other_rows;
  Outcome outcome{0, -price * (draft + costs_.extend(requests)), price};
  more = 0.0;
  for (size_t n = 1; n <= most; ++n) {
    more += worths[n - 1];
    const double seconds =
        draft + verify(due + static_cast<double>(n)) - verify(due) + costs_.extend(requests + more);
    const double gain = more - price * seconds;
    if (gain > outcome.gain) outcome = {n, gain, price};
  }
  return outcome;
}

std::vector<double> AdaptiveBudget::worths(const ddtree::Tree& tree) const {
  if (tree.log_probs.size() != tree.token_ids.size()) {
    throw std::invalid_argument("a tree of " + std::to_string(tree.token_ids.size()) +
                                " nodes has " + std::to_string(tree.log_probs.size()) +
                                " log_probs; an adaptive budget needs all of them");
  }
  std::vector<double> worths;
  for (size_t i = 0; i < tree.log_probs.size(); ++i) {
    worths.push_back(std::min(1.0, std::exp(tree.log_probs[i]) * correction(tree.depths[i])));
  }
  return worths;
}

void AdaptiveBudget::remember(std::span<const std::vector<double>> trees) {
  for (const std::vector<double>& tree : trees) {
    // The plain mean, until there are as many trees as the memory holds.
    trees_seen_ = std::min(trees_seen_ + 1.0, kMemory);
    profile_.resize(std::max(profile_.size(), tree.size()));
    for (size_t i = 0; i < profile_.size(); ++i) {
      const double worth = i < tree.size() ? tree[i] : 0.0;
      profile_[i] += (worth - profile_[i]) / trees_seen_;
    }
  }
}

void AdaptiveBudget::observe(const ddtree::Tree& tree, int32_t accepted) {
  for (auto* sums : {&expected_, &accepted_}) {
    for (double& sum : *sums) sum *= 1.0 - 1.0 / kMemory;
  }
  for (size_t i = 0; i < tree.log_probs.size(); ++i) {
    const auto depth = static_cast<size_t>(tree.depths[i]);
    if (depth > expected_.size()) {
      expected_.resize(depth);
      accepted_.resize(depth);
    }
    expected_[depth - 1] += std::exp(tree.log_probs[i]);
  }
  for (size_t d = 0; d < accepted_.size() && static_cast<int32_t>(d) < accepted; ++d) {
    accepted_[d] += 1.0;
  }
}

double AdaptiveBudget::correction(int32_t depth) const {
  double factor = 1.0;
  const auto observed = std::min<size_t>(std::max(0, depth), expected_.size());
  for (size_t d = 0; d < observed; ++d) {
    factor = (accepted_[d] + kPrior * factor) / (expected_[d] + kPrior);
    factor = std::clamp(factor, 1.0 / kMaxCorrection, kMaxCorrection);
  }
  return factor;
}

}  // namespace trtree
