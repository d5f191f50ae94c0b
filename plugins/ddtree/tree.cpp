#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#include "plugins/ddtree/ddtree.hpp"

namespace trtree::ddtree {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::string shape(int32_t rows, int32_t columns) {
  return "[" + std::to_string(rows) + ", " + std::to_string(columns) + "]";
}

void check_size(const char* name, size_t size, int32_t depth, int32_t top_k) {
  if (depth < 0 || top_k < 0 || size != size_t(depth) * top_k) {
    throw std::invalid_argument(std::string(name) + ": " + std::to_string(size) +
                                " values are not [depth, top_k] = " + shape(depth, top_k));
  }
}

void check_log_probs(std::span<const float> log_probs, int32_t depth, int32_t top_k) {
  for (int32_t d = 0; d < depth; ++d) {
    float previous = std::numeric_limits<float>::max();
    for (int32_t r = 0; r < top_k; ++r) {
      const float log_prob = log_probs[size_t(d) * top_k + r];
      if (!(log_prob <= previous)) {
        throw std::invalid_argument(
            "log_probs at depth " + std::to_string(d) + ", rank " + std::to_string(r) + ": " +
            std::to_string(log_prob) +
            (r == 0 ? " is not a log-prob"
                    : " comes after " + std::to_string(previous) + "; a row must not increase"));
      }
      previous = log_prob;
    }
  }
}

// A prefix on the heap: a node that would hang under row `parent`.
struct Candidate {
  double log_prob;
  int32_t parent;
  int32_t rank;
  int32_t depth;
};

// The best-first search. Rank paths are never written out: a node knows its parent
// and its own rank.
class Builder {
 public:
  Builder(std::span<const float> log_probs, std::span<const int32_t> token_ids, int32_t depth,
          int32_t top_k)
      : log_probs_(log_probs), token_ids_(token_ids), depth_(depth), top_k_(top_k) {}

  Tree build(int32_t budget, bool chain_seed);

 private:
  // In float64, as all sums of log-probs.
  double at(int32_t depth, int32_t rank) const { return log_probs_[size_t(depth) * top_k_ + rank]; }

  auto worse() const {
    return [this](const Candidate& a, const Candidate& b) {
      if (a.log_prob != b.log_prob) return a.log_prob < b.log_prob;
      return path_less(b, a);
    };
  }

  // Lexicographic order of the rank paths. Neither is a prefix of the other: what lies
  // above a candidate is in the tree, and a candidate is not. So at some depth both
  // hang under one row with different ranks.
  bool path_less(Candidate a, Candidate b) const {
    while (a.depth > b.depth) lift(a);
    while (b.depth > a.depth) lift(b);
    while (a.parent != b.parent) {
      lift(a);
      lift(b);
    }
    return a.rank < b.rank;
  }

  void lift(Candidate& c) const {
    c.rank = ranks_[c.parent];
    c.parent = tree_.parents[c.parent];
    --c.depth;
  }

  // Make a node of a candidate; returns its row.
  int32_t add(const Candidate& c) {
    tree_.token_ids.push_back(token_ids_[size_t(c.depth - 1) * top_k_ + c.rank]);
    tree_.depths.push_back(c.depth);
    tree_.parents.push_back(c.parent);
    tree_.log_probs.push_back(c.log_prob);
    ranks_.push_back(c.rank);
    return tree_.num_rows() - 1;
  }

  void push_sibling(const Candidate& c) {
    if (c.rank + 1 == top_k_) return;
    // The order of these two operations is part of the contract.
    const double log_prob = c.log_prob - at(c.depth - 1, c.rank) + at(c.depth - 1, c.rank + 1);
    push({log_prob, c.parent, c.rank + 1, c.depth});
  }

  // The first child of the node at `row`, made of `c`.
  Candidate child(const Candidate& c, int32_t row) const {
    return {c.log_prob + at(c.depth, 0), row, 0, c.depth + 1};
  }

  // A forbidden token can neither be accepted nor lead to one that can.
  static bool possible(const Candidate& c) { return c.log_prob > -kInfinity; }

  void push(const Candidate& candidate) {
    if (!possible(candidate)) return;
    heap_.push_back(candidate);
    std::push_heap(heap_.begin(), heap_.end(), worse());
  }

  std::span<const float> log_probs_;
  std::span<const int32_t> token_ids_;
  int32_t depth_;
  int32_t top_k_;
  Tree tree_;
  std::vector<int32_t> ranks_;  // of each row
  std::vector<Candidate> heap_;
};

Tree Builder::build(int32_t budget, bool chain_seed) {
  tree_.parents.push_back(-1);
  ranks_.push_back(-1);
  if (budget <= 0 || depth_ == 0) return std::move(tree_);
  Candidate first{at(0, 0), 0, 0, 1};
  if (chain_seed) {
    while (possible(first) && tree_.num_rows() <= budget) {
      const int32_t row = add(first);
      push_sibling(first);
      if (first.depth == depth_) break;
      first = child(first, row);
    }
  } else {
    push(first);
  }
  while (!heap_.empty() && tree_.num_rows() <= budget) {
    std::pop_heap(heap_.begin(), heap_.end(), worse());
    const Candidate best = heap_.back();
    heap_.pop_back();
    const int32_t row = add(best);
    push_sibling(best);
    if (best.depth < depth_) push(child(best, row));
  }
  return std::move(tree_);
}

using Path = std::vector<int32_t>;

std::string text(const Path& path) {
  std::string out = "choice [";
  for (const int32_t rank : path) out += (out.back() == '[' ? "" : ", ") + std::to_string(rank);
  return out + "]";
}

void check_path(const Path& path, int32_t depth, int32_t top_k) {
  if (path.empty() || path.size() > size_t(depth)) {
    throw std::invalid_argument(text(path) + ": its depth is not between 1 and the drafter's " +
                                std::to_string(depth));
  }
  for (const int32_t rank : path) {
    if (rank < 0 || rank >= top_k) {
      throw std::invalid_argument(text(path) + ": rank " + std::to_string(rank) +
                                  " is not among the " + std::to_string(top_k) +
                                  " of a depth; raise top_k or drop the choice");
    }
  }
}

}  // namespace

std::vector<int32_t> Tree::packed_mask() const {
  const size_t rows = parents.size();
  const size_t words = (rows + 31) / 32;
  std::vector<int32_t> mask(rows * words);
  for (size_t row = 0; row < rows; ++row) {
    int32_t* const bits = &mask[row * words];
    if (parents[row] >= 0) std::copy_n(&mask[parents[row] * words], words, bits);
    bits[row / 32] |= static_cast<int32_t>(1u << (row % 32));
  }
  return mask;
}

void Tree::keep_first(int32_t nodes) {
  const size_t n = std::min<size_t>(std::max(nodes, 0), token_ids.size());
  token_ids.resize(n);
  depths.resize(n);
  parents.resize(n + 1);
  if (!log_probs.empty()) log_probs.resize(n);
}

Tree build_tree(std::span<const float> log_probs, std::span<const int32_t> token_ids, int32_t depth,
                int32_t top_k, int32_t budget, bool chain_seed) {
  check_size("log_probs", log_probs.size(), depth, top_k);
  check_size("token_ids", token_ids.size(), depth, top_k);
  if (budget > 0 && depth > 0 && top_k < 1) {
    throw std::invalid_argument("top_k must be at least 1 for a tree of budget " +
                                std::to_string(budget));
  }
  check_log_probs(log_probs, depth, top_k);
  return Builder(log_probs, token_ids, depth, top_k).build(budget, chain_seed);
}

Tree chain(std::span<const int32_t> token_ids) {
  Tree tree;
  tree.parents.push_back(-1);
  for (const int32_t token : token_ids) {
    const int32_t last = tree.num_rows() - 1;
    tree.token_ids.push_back(token);
    tree.depths.push_back(last + 1);
    tree.parents.push_back(last);
  }
  return tree;
}

Tree static_tree(std::span<const Path> choices, std::span<const int32_t> token_ids, int32_t depth,
                 int32_t top_k) {
  check_size("token_ids", token_ids.size(), depth, top_k);
  std::vector<const Path*> nodes;
  for (const Path& path : choices) {
    check_path(path, depth, top_k);
    nodes.push_back(&path);
  }
  const auto before = [](const Path* a, const Path* b) {
    return a->size() != b->size() ? a->size() < b->size() : *a < *b;
  };
  std::sort(nodes.begin(), nodes.end(), before);

  Tree tree;
  tree.parents.push_back(-1);
  for (auto node = nodes.begin(); node != nodes.end(); ++node) {
    const Path& path = **node;
    if (node != nodes.begin() && *node[-1] == path) {
      throw std::invalid_argument(text(path) + " is there twice");
    }
    int32_t parent = 0;
    if (path.size() > 1) {
      const Path prefix(path.begin(), path.end() - 1);
      const auto found = std::lower_bound(nodes.begin(), node, &prefix, before);
      if (found == node || **found != prefix) {
        throw std::invalid_argument(text(path) + " has no parent: " + text(prefix) + " is missing");
      }
      parent = static_cast<int32_t>(found - nodes.begin()) + 1;
    }
    const auto d = static_cast<int32_t>(path.size()) - 1;
    tree.token_ids.push_back(token_ids[size_t(d) * top_k + path.back()]);
    tree.depths.push_back(d + 1);
    tree.parents.push_back(parent);
  }
  return tree;
}

int32_t Tree::child(int32_t row, int32_t token_id) const {
  for (int32_t next = row + 1; next < num_rows(); ++next) {
    if (parents[next] == row && token_ids[next - 1] == token_id) return next;
  }
  return -1;
}

Walk walk(const Tree& tree, std::span<const int32_t> choices) {
  if (choices.size() != tree.parents.size()) {
    throw std::invalid_argument("choices: " + std::to_string(choices.size()) +
                                " values for a tree of " + std::to_string(tree.parents.size()) +
                                " rows");
  }
  Walk walk{{0}, choices[0]};
  // Children come after their parent, so one look at each row is enough.
  for (int32_t row = 1; row < tree.num_rows(); ++row) {
    if (tree.parents[row] == walk.accepted.back() && tree.token_ids[row - 1] == walk.bonus) {
      walk.accepted.push_back(row);
      walk.bonus = choices[row];
    }
  }
  return walk;
}

}  // namespace trtree::ddtree
