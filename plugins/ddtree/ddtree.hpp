// DDTree: best-first draft trees from per-depth marginals, and the lossless walk.
// Ringel & Romano, arXiv 2604.12989. The contract is in README.md.
//
// Row 0 of a tree is the root: the bonus token, chosen by the target in the round
// before. Row i + 1 is node i. Everything here throws std::invalid_argument.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace trtree::ddtree {

struct Tree {
  std::vector<int32_t> token_ids;  // [n]
  std::vector<int32_t> depths;     // [n] from 1
  std::vector<int32_t> parents;    // [n + 1] rows, parents[row] < row; the root's is -1
  // [n] of the path from the root, under the product of the marginals. Only from build_tree,
  // else empty.
  std::vector<double> log_probs;

  int32_t num_rows() const { return static_cast<int32_t>(parents.size()); }
  // The row of `row`'s child with this token, the lowest of several; -1: there is none.
  int32_t child(int32_t row, int32_t token_id) const;
  // [n + 1, ceil((n + 1) / 32)]: bit j % 32, from the lowest, of word j / 32 in row i
  // is set where row i attends row j, that is for its ancestors and itself.
  std::vector<int32_t> packed_mask() const;
  // Keep the first `nodes` nodes; all of them where there are no more. What is left is the
  // tree that build_tree gives for that smaller budget.
  void keep_first(int32_t nodes);
};

struct Walk {
  std::vector<int32_t> accepted;  // rows, root included, increasing
  int32_t bonus;                  // the target's choice after the last of them
};

// The top_k largest logits of each row, equal ones by lower id: log_probs and
// token_ids [depth, top_k], from logits [depth, vocab]. log-prob = float32(logit) -
// float32(log-sum-exp over the row, summed in float64). -inf marks a forbidden token,
// which ranks last, with log-prob -inf. Throws where a row holds NaN or +inf or only
// -inf, and unless 1 <= top_k <= vocab. The result does not depend on num_threads
// (0: one per processor, 8 at most).
void top_k_log_probs(std::span<const float> logits, int32_t depth, int32_t vocab, int32_t top_k,
                     int32_t num_threads, std::span<float> log_probs, std::span<int32_t> token_ids);

// The `budget` most probable prefixes under the product of the marginals (section 4
// of the paper), most probable first; fewer where the prefixes of log-prob above
// -inf run out. log_probs and token_ids are [depth, top_k]; each row of log_probs must
// not increase. budget <= 0: the root only. With chain_seed, the first min(depth, budget)
// nodes are the chain of each depth's first rank instead, and the most probable prefixes
// besides it follow.
Tree build_tree(std::span<const float> log_probs, std::span<const int32_t> token_ids, int32_t depth,
                int32_t top_k, int32_t budget, bool chain_seed = false);

// One node per depth.
Tree chain(std::span<const int32_t> token_ids);

// The same shape in every round: `choices` are Medusa rank paths, one for each node and
// in any order; the nodes are numbered by depth, then lexicographically. token_ids is
// [depth, top_k]. Refuses a path deeper than `depth`, a rank outside [0, top_k), a
// duplicate, and a path without its prefix.
Tree static_tree(std::span<const std::vector<int32_t>> choices, std::span<const int32_t> token_ids,
                 int32_t depth, int32_t top_k);

// Follows the target's choices [n + 1] (at each row) from the root while they are
// children; among siblings of one token the lower row is taken.
Walk walk(const Tree& tree, std::span<const int32_t> choices);

}  // namespace trtree::ddtree
