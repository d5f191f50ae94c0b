#include "runtime/cpp/drafting.hpp"

#include <algorithm>
#include <iterator>

namespace trtree {

int32_t useful_depth(const Capabilities& capabilities, const SpeculativeConfig& config,
                     int32_t tokens_wanted) {
  if (config.mode == DecodingMode::kPlain) return 0;
  if (config.mode == DecodingMode::kTree && config.tree_budget == 0) return 0;
  int32_t depth = std::min(capabilities.block_size - 1, tokens_wanted - 1);
  if (config.mode == DecodingMode::kChain) depth = std::min(depth, capabilities.verify_width - 1);
  return std::max(0, depth);
}

int32_t draft_top_k(const Capabilities& capabilities, const SpeculativeConfig& config) {
  if (config.mode == DecodingMode::kChain) return 1;
  if (config.tree == TreeKind::kStatic) return capabilities.max_top_k;
  const int32_t wanted = config.top_k > 0 ? config.top_k : config.tree_budget;
  return std::clamp(wanted, 1, capabilities.max_top_k);
}

int32_t verify_rows(const Capabilities& capabilities, const SpeculativeConfig& config) {
  switch (config.mode) {
    case DecodingMode::kPlain:
      return 1;
    case DecodingMode::kChain:
      return std::max(1, std::min(capabilities.block_size, capabilities.verify_width));
    case DecodingMode::kTree:
      break;
  }
  return 1 + config.tree_budget;
}

ddtree::Tree draft_tree(const Capabilities& capabilities, const SpeculativeConfig& config,
                        const DraftResult& draft, int32_t index, int32_t depth,
                        const std::vector<std::vector<int32_t>>& static_choices) {
  // The batch was drafted with the largest top_k any of its requests asked for.
  const int32_t top_k = std::min(draft_top_k(capabilities, config), draft.top_k);
  std::vector<float> log_probs;
  std::vector<int32_t> token_ids;
  for (int32_t d = 0; d < depth; ++d) {
    const size_t first = (static_cast<size_t>(index) * draft.depth + d) * draft.top_k;
    log_probs.insert(log_probs.end(), draft.log_probs.begin() + first,
                     draft.log_probs.begin() + first + top_k);
    token_ids.insert(token_ids.end(), draft.token_ids.begin() + first,
                     draft.token_ids.begin() + first + top_k);
  }
  if (config.mode == DecodingMode::kChain) {
    return ddtree::build_tree(log_probs, token_ids, depth, top_k, depth);  // its top_k is 1
  }
  if (config.tree == TreeKind::kStatic) {
    std::vector<std::vector<int32_t>> choices;
    std::copy_if(static_choices.begin(), static_choices.end(), std::back_inserter(choices),
                 [&](const auto& path) { return static_cast<int32_t>(path.size()) <= depth; });
    return ddtree::static_tree(choices, token_ids, depth, top_k);
  }
  return ddtree::build_tree(log_probs, token_ids, depth, top_k, config.tree_budget,
                            config.chain_seed);
}

}  // namespace trtree
