// Who owns which KV page, and the prefix cache over them.
//
// One page holds the target's and the drafter's KV of page_size tokens, all layers. A full
// page of committed tokens may be published: a later request whose tokens begin with the
// same ones reads it instead of computing it again. Pages are counted by their readers;
// published pages without one stay until their room is needed, the longest unused first.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace trtree {

class KvPages {
 public:
  // Without `reuse` nothing is kept: publish() and acquire_prefix() do nothing.
  KvPages(int32_t num_pages, int32_t page_size, bool reuse);

  // What a request holds, in token order.
  struct Lease {
    std::vector<int32_t> pages;
    int32_t published = 0;  // leading pages that are known to the cache
    int64_t tip = kRoot;    // the cache's entry for the last of them
  };

  // The longest cached prefix of `tokens`, whole pages only, into an empty lease; returns
  // its length in tokens. with_drafter: only pages that hold the drafter's KV too.
  int32_t acquire_prefix(Lease& lease, std::span<const int32_t> tokens, bool with_drafter);

  // Make the lease `count` pages long, giving up cached pages where none is free. False,
  // with nothing changed, if there are not enough.
  bool grow(Lease& lease, int32_t count);

  // Offer the full pages of `committed` tokens that are not published yet. An equal page
  // that another request published first stays the cache's, unless only this one holds
  // the drafter's KV.
  void publish(Lease& lease, std::span<const int32_t> committed, bool with_drafter);

  // Give all pages back.
  void release(Lease& lease);

  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_cached() const { return static_cast<int32_t>(unread_.size()); }
  int32_t num_available() const { return num_free() + num_cached(); }
  int32_t page_size() const { return page_size_; }

 private:
  static constexpr int64_t kRoot = 0;
  static constexpr int64_t kNone = -1;

  // One published page: the tokens up to its end are those of its ancestors and its own.
  struct Node {
    int64_t parent = kNone;
    int32_t depth = 0;
    int32_t page = -1;
    bool with_drafter = false;
    int64_t last_used = 0;
    std::vector<int32_t> tokens;
    std::map<std::vector<int32_t>, int64_t> children;
  };
  // The order in which pages are given up: the longest unused, of those the deepest.
  using Eviction = std::tuple<int64_t, int32_t, int64_t>;

  Eviction eviction(int64_t id) const {
    const Node& node = nodes_.at(id);
    return {node.last_used, -node.depth, id};
  }
  void read(int32_t page);
  void unread(int32_t page);
  void replace_page(int64_t id, int32_t page);
  void remove(int64_t id);

  const int32_t page_size_;
  const bool reuse_;
  std::vector<int32_t> free_;     // the last one is given next
  std::vector<int32_t> readers_;  // [pages]
  std::vector<int64_t> node_of_;  // [pages], kNone: not published
  std::unordered_map<int64_t, Node> nodes_;
  std::set<Eviction> unread_;  // published pages without a reader
  int64_t next_node_ = 1;
  int64_t clock_ = 0;
};

}  // namespace trtree
