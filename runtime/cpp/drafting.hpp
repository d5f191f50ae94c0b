// From a request's speculative configuration and the drafter's marginals to its
// draft tree. Plain decoding is the tree that is only a root, a chain the tree with
// one node per depth.
#pragma once

#include <cstdint>
#include <vector>

#include "plugins/ddtree/ddtree.hpp"
#include "runtime/cpp/engine.hpp"
#include "runtime/cpp/request.hpp"

namespace trtree {

// Depths of the tree worth verifying: what the drafter offers, but no deeper than the
// tokens still wanted, of which the target's own choice at a leaf is one.
int32_t useful_depth(const Capabilities& capabilities, const SpeculativeConfig& config,
                     int32_t tokens_wanted);

// Ranks per depth to ask the drafter for.
int32_t draft_top_k(const Capabilities& capabilities, const SpeculativeConfig& config);

// Most rows, root included, that a round with this configuration can need.
int32_t verify_rows(const Capabilities& capabilities, const SpeculativeConfig& config);

// The tree of the request at `index` of a draft, cut to `depth`. `static_choices` are the
// rank paths of the engine's static tree.
ddtree::Tree draft_tree(const Capabilities& capabilities, const SpeculativeConfig& config,
                        const DraftResult& draft, int32_t index, int32_t depth,
                        const std::vector<std::vector<int32_t>>& static_choices);

}  // namespace trtree
