#include "runtime/cpp/kv_pages.hpp"

#include <utility>

namespace trtree {

KvPages::KvPages(int32_t num_pages, int32_t page_size, bool reuse)
    : page_size_(page_size),
      reuse_(reuse),
      readers_(num_pages, 0),
      node_of_(num_pages, kNone),
      nodes_{{kRoot, Node{}}} {
  free_.reserve(num_pages);
  for (int32_t page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

int32_t KvPages::acquire_prefix(Lease& lease, std::span<const int32_t> tokens, bool with_drafter) {
  if (!reuse_) return 0;
  for (size_t first = 0; first + page_size_ <= tokens.size(); first += page_size_) {
    const auto& children = nodes_.at(lease.tip).children;
    const auto begin = tokens.begin() + static_cast<int64_t>(first);
    const auto found = children.find({begin, begin + page_size_});
    if (found == children.end()) break;
    const Node& node = nodes_.at(found->second);
    if (with_drafter && !node.with_drafter) break;
    read(node.page);
    lease.pages.push_back(node.page);
    lease.tip = found->second;
    ++lease.published;
  }
  return lease.published * page_size_;
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
      const Node node{parent->first, parent->second.depth + 1, page, with_drafter,
                      clock_,        std::move(tokens),        {}};
      nodes_.emplace(next_node_, node);
      node_of_[page] = next_node_++;
    } else if (with_drafter && !nodes_.at(lease.tip).with_drafter) {
      replace_page(lease.tip, page);
    }
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

// The entry's tokens are the same on `page`, which holds the drafter's KV too.
void KvPages::replace_page(int64_t id, int32_t page) {
  Node& node = nodes_.at(id);
  node_of_[node.page] = kNone;
  if (readers_[node.page] == 0) {
    unread_.erase(eviction(id));
    free_.push_back(node.page);
  }
  node.page = page;
  node.with_drafter = true;
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
    if (readers_[node.page] == 0) {
      unread_.erase(eviction(next));
      free_.push_back(node.page);
    }
    nodes_.erase(next);
  }
}

}  // namespace trtree
