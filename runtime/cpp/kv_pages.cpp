#include "runtime/cpp/kv_pages.hpp"

#include <algorithm>
#include <utility>

namespace trtree {

KvPages::KvPages(int32_t num_pages, int32_t page_size, bool reuse, std::optional<int32_t> snapshots)
    : page_size_(page_size),
      reuse_(reuse),
      needs_snapshots_(snapshots.has_value()),
      readers_(num_pages, 0),
      node_of_(num_pages, kNone),
      nodes_{{kRoot, Node{}}},
      snapshots_(reuse ? snapshots.value_or(0) : 0) {
  free_.reserve(num_pages);
  for (int32_t page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

KvPages::Prefix KvPages::acquire_prefix(Lease& lease, std::span<const int32_t> tokens,
                                        bool with_drafter) {
  if (!reuse_) return {};
  std::vector<int64_t> path = cached(lease.tip, tokens);
  if (with_drafter) {
    path.erase(std::find_if(path.begin(), path.end(),
                            [&](int64_t id) { return !nodes_.at(id).with_drafter; }),
               path.end());
  }
  Prefix prefix;
  prefix.paged = static_cast<int32_t>(path.size()) * page_size_;
  while (needs_snapshots_ && !path.empty() && nodes_.at(path.back()).snapshot < 0) path.pop_back();
  for (const int64_t id : path) {
    read(nodes_.at(id).page);
    lease.pages.push_back(nodes_.at(id).page);
    lease.tip = id;
  }
  lease.published = static_cast<int32_t>(path.size());
  prefix.length = lease.published * page_size_;
  if (needs_snapshots_ && !path.empty()) {
    prefix.snapshot = nodes_.at(lease.tip).snapshot;
    snapshots_[prefix.snapshot].moves = false;
    snapshots_[prefix.snapshot].last_used = ++clock_;
  }
  return prefix;
}

// The entries for the full pages of `tokens` that follow an entry, as far as there are any.
std::vector<int64_t> KvPages::cached(int64_t from, std::span<const int32_t> tokens) const {
  std::vector<int64_t> path;
  for (auto node = nodes_.find(from);
       node != nodes_.end() && tokens.size() >= static_cast<size_t>(page_size_);
       tokens = tokens.subspan(page_size_)) {
    const auto page = tokens.first(page_size_);
    const auto child = node->second.children.find({page.begin(), page.end()});
    if (child == node->second.children.end()) break;
    path.push_back(child->second);
    node = nodes_.find(child->second);
  }
  return path;
}

bool KvPages::grow(Lease& lease, int32_t count) {
  const int32_t wanted = count - static_cast<int32_t>(lease.pages.size());
  if (wanted > num_available()) return false;
  for (int32_t i = 0; i < wanted; ++i) {
    if (free_.empty()) remove(std::get<2>(*unread_.begin()));
    lease.pages.push_back(free_.back());
    free_.pop_back();
    read(lease.pages.back());
  }
  return true;
}

void KvPages::publish(Lease& lease, std::span<const int32_t> committed, bool with_drafter) {
  if (!reuse_) return;
  const auto full = static_cast<int32_t>(committed.size()) / page_size_;
  for (; lease.published < full; ++lease.published) {
    const auto parent = nodes_.find(lease.tip);
    if (parent == nodes_.end()) return;  // given up meanwhile: what follows cannot be found
    const auto begin = committed.begin() + static_cast<int64_t>(lease.published) * page_size_;
    const int32_t page = lease.pages[lease.published];
    std::vector<int32_t> tokens(begin, begin + page_size_);
    const auto [child, is_new] = parent->second.children.try_emplace(tokens, next_node_);
    lease.tip = child->second;
    if (is_new) {
      const Node node{parent->first,
                      parent->second.depth + 1,
                      page,
                      with_drafter,
                      clock_,
                      -1,
                      std::move(tokens),
                      {}};
      nodes_.emplace(next_node_, node);
      node_of_[page] = next_node_++;
      continue;
    }
    const Node& known = nodes_.at(lease.tip);
    const bool better = with_drafter && !known.with_drafter;
    // Where nobody reads the cache's, this one takes its place while it is read.
    const bool as_good = with_drafter == known.with_drafter && readers_[known.page] == 0;
    if (better || as_good) replace_page(lease.tip, page, with_drafter);
  }
}

void KvPages::release(Lease& lease) {
  ++clock_;
  for (const int32_t page : lease.pages) {
    if (node_of_[page] != kNone) nodes_.at(node_of_[page]).last_used = clock_;
    unread(page);
  }
  lease = {};
}

void KvPages::read(int32_t page) {
  if (readers_[page]++ == 0 && node_of_[page] != kNone) unread_.erase(eviction(node_of_[page]));
}

void KvPages::unread(int32_t page) {
  if (--readers_[page] > 0) return;
  if (node_of_[page] == kNone) {
    free_.push_back(page);
  } else {
    unread_.insert(eviction(node_of_[page]));
  }
}

// The entry's tokens are the same on `page`.
void KvPages::replace_page(int64_t id, int32_t page, bool with_drafter) {
  Node& node = nodes_.at(id);
  node_of_[node.page] = kNone;
  if (readers_[node.page] == 0) {
    unread_.erase(eviction(id));
    free_.push_back(node.page);
  }
  node.page = page;
  node.with_drafter = with_drafter;
  node_of_[page] = id;
}

// Forget an entry and all that follow it: without it they cannot be found.
void KvPages::remove(int64_t id) {
  nodes_.at(nodes_.at(id).parent).children.erase(nodes_.at(id).tokens);
  std::vector<int64_t> doomed{id};
  while (!doomed.empty()) {
    const int64_t next = doomed.back();
    doomed.pop_back();
    const Node& node = nodes_.at(next);
    for (const auto& [tokens, child] : node.children) doomed.push_back(child);
    node_of_[node.page] = kNone;
    if (node.snapshot >= 0) detach(node.snapshot);
    if (readers_[node.page] == 0) {
      unread_.erase(eviction(next));
      free_.push_back(node.page);
    }
    nodes_.erase(next);
  }
}

int32_t KvPages::take_snapshot(Lease& lease, std::span<const int32_t> committed, bool moves) {
  if (!nodes_.contains(lease.tip)) return -1;  // given up meanwhile: it could not be found
  const auto end = static_cast<int32_t>(committed.size()) / page_size_;
  const std::vector<int64_t> path =
      cached(lease.tip, committed.subspan(static_cast<size_t>(lease.published) * page_size_));
  if (static_cast<int32_t>(path.size()) == end - lease.published && !path.empty()) {
    if (const int32_t there = nodes_.at(path.back()).snapshot; there >= 0) {
      snapshots_[there].moves = false;
      snapshots_[there].last_used = ++clock_;
      return -1;
    }
  }
  // The one that is left behind, or one that is free, or else the longest unused.
  const auto rank = [&](const Snapshot& s) -> int64_t {
    const bool own =
        moves && s.moves && &s - snapshots_.data() == lease.moving && s.node == lease.moving_at;
    return own ? -2 : s.node == kNone ? -1 : s.node == kTaken ? INT64_MAX : s.last_used;
  };
  const auto found =
      std::min_element(snapshots_.begin(), snapshots_.end(),
                       [&](const auto& a, const auto& b) { return rank(a) < rank(b); });
  if (found == snapshots_.end() || found->node == kTaken) return -1;
  const auto snapshot = static_cast<int32_t>(found - snapshots_.begin());
  if (found->node != kNone) detach(snapshot);
  *found = {kTaken, 0, moves};
  return snapshot;
}

void KvPages::keep_snapshot(Lease& lease, int32_t pages, int32_t snapshot) {
  const bool moves = snapshots_[snapshot].moves;
  snapshots_[snapshot] = {};
  // Entries above one that is there are there too.
  auto node = nodes_.find(lease.tip);
  if (node == nodes_.end() || node->second.depth < pages) return;  // given up meanwhile
  while (node->second.depth > pages) node = nodes_.find(node->second.parent);
  if (node->second.snapshot >= 0) return;  // another request's of this round
  node->second.snapshot = snapshot;
  snapshots_[snapshot] = {node->first, ++clock_, moves};
  if (!moves) return;
  lease.moving = snapshot;
  lease.moving_at = node->first;
}

void KvPages::drop_taken_snapshots() {
  for (Snapshot& snapshot : snapshots_) {
    if (snapshot.node == kTaken) snapshot.node = kNone;
  }
}

int32_t KvPages::num_kept_snapshots() const {
  return static_cast<int32_t>(std::count_if(snapshots_.begin(), snapshots_.end(),
                                            [](const Snapshot& s) { return s.node >= 0; }));
}

void KvPages::detach(int32_t snapshot) {
  nodes_.at(snapshots_[snapshot].node).snapshot = -1;
  snapshots_[snapshot].node = kNone;
}

}  // namespace trtree
