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
constexpr double kProfileMemory = 32.0;
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

bool AdaptiveBudget::should_draft(const RoundLoad& load) {
  const size_t requests = std::max(1, load.requests);
  if (best(load, std::vector<double>(kLongestDraft * requests, 1.0)).gain <= 0.0) return false;
  if (trees_seen_ < kProfileMemory) return true;
  std::vector<double> worths;
  for (const double worth : falling(profile_)) {
    worths.insert(worths.end(), requests, worth);
  }
  if (best(load, worths).gain <= 0.0) {
    ++rounds_without_;
    seconds_without_ += costs_.verify_seconds(load.requests + load.other_rows, load.mean_context);
    if (rounds_without_ < kProbeInterval) return false;
    if (costs_.draft(load.requests) > kProbeShare * seconds_without_) return false;
  }
  rounds_without_ = 0;
  seconds_without_ = 0.0;
  return true;
}

std::vector<int32_t> AdaptiveBudget::choose(const RoundLoad& load,
                                            std::span<const ddtree::Tree* const> trees) {
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
  return kept;
}

// Of the first so many of `worths`, which all are worth most. The price of a second is the
// most tokens that a round of these requests alone can bring in one, drafting or not.
AdaptiveBudget::Outcome AdaptiveBudget::best(const RoundLoad& load,
                                             std::span<const double> worths) const {
  const size_t most = std::min<size_t>(worths.size(), std::max(0, load.max_nodes));
  const auto verify = [&](double rows) { return costs_.verify_seconds(rows, load.mean_context); };
  const double requests = load.requests;
  const double draft = costs_.draft(requests);
  double price = requests / verify(requests);
  double tokens = requests;
  for (size_t n = 0; n <= most; ++n) {
    if (n > 0) tokens += worths[n - 1];
    price = std::max(price, tokens / (draft + verify(requests + static_cast<double>(n))));
  }

  const double due = requests + load.other_rows;
  Outcome outcome{0, -price * draft};
  tokens = 0.0;
  for (size_t n = 1; n <= most; ++n) {
    tokens += worths[n - 1];
    const double seconds = draft + verify(due + static_cast<double>(n)) - verify(due);
    const double gain = tokens - price * seconds;
    if (gain > outcome.gain) outcome = {n, gain};
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
    trees_seen_ = std::min(trees_seen_ + 1.0, kProfileMemory);
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
