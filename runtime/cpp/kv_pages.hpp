// Who owns which KV page, and the prefix cache over them.
//
// One page holds the target's and the drafter's KV of page_size tokens, all layers. A full
// page of committed tokens may be published: a later request whose tokens begin with the
// same ones reads it instead of computing it again. Pages are counted by their readers;
// published pages without one stay until their room is needed, the longest unused first.
//
// Where requests have state beside KV, a page alone is no place to begin: it takes a snapshot
// of that state at the page's end. Snapshots lie beside published pages and go with them, or
// when another one needs their place, the longest unused first.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace trtree {

class KvPages {
 public:
  // Without `reuse` nothing is kept: publish() and acquire_prefix() do nothing. snapshots:
  // places for them; nullopt where KV is all that requests have.
  KvPages(int32_t num_pages, int32_t page_size, bool reuse,
          std::optional<int32_t> snapshots = std::nullopt);

  // What a request holds, in token order.
  struct Lease {
    std::vector<int32_t> pages;
    int32_t published = 0;  // leading pages that are known to the cache
    int64_t tip = kRoot;    // the cache's entry for the last of them
    // The snapshot that follows the request's progress, and the entry it is beside.
    int32_t moving = -1;
    int64_t moving_at = kNone;
  };

  // Tokens to begin with, the snapshot of the state after them (-1: none is needed), and how
  // many tokens there were pages for.
  struct Prefix {
    int32_t length = 0;
    int32_t snapshot = -1;
    int32_t paged = 0;
  };

  // The longest cached prefix of `tokens`, whole pages only, into an empty lease.
  // with_drafter: only pages that hold the drafter's KV too.
  Prefix acquire_prefix(Lease& lease, std::span<const int32_t> tokens, bool with_drafter);

  // Make the lease `count` pages long, giving up cached pages where none is free. False,
  // with nothing changed, if there are not enough.
  bool grow(Lease& lease, int32_t count);

  // Offer the full pages of `committed` tokens that are not published yet. An equal page
  // that another request published first stays the cache's while it is read, unless only
  // this one holds the drafter's KV.
  void publish(Lease& lease, std::span<const int32_t> committed, bool with_drafter);

  // Give all pages back.
  void release(Lease& lease);

  // A place for a snapshot of the state after `committed` tokens, whole pages of them that are
  // published next; -1 where there is one already, or none can be had. One that `moves` comes
  // from where the lease's last such one was, unless others have begun with that.
  int32_t take_snapshot(Lease& lease, std::span<const int32_t> committed, bool moves);

  // The taken snapshot has been written: it belongs to the lease's first `pages` pages.
  void keep_snapshot(Lease& lease, int32_t pages, int32_t snapshot);

  // Those taken and not kept have not been written.
  void drop_taken_snapshots();

  int32_t num_snapshots() const { return static_cast<int32_t>(snapshots_.size()); }
  int32_t num_kept_snapshots() const;
  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_cached() const { return static_cast<int32_t>(unread_.size()); }
  int32_t num_available() const { return num_free() + num_cached(); }
  int32_t page_size() const { return page_size_; }

 private:
  static constexpr int64_t kRoot = 0;
  static constexpr int64_t kNone = -1;
  static constexpr int64_t kTaken = -2;  // a snapshot that is being written

  // One published page: the tokens up to its end are those of its ancestors and its own.
  struct Node {
    int64_t parent = kNone;
    int32_t depth = 0;
    int32_t page = -1;
    bool with_drafter = false;
    int64_t last_used = 0;
    int32_t snapshot = -1;
    std::vector<int32_t> tokens;
    std::map<std::vector<int32_t>, int64_t> children;
  };
  struct Snapshot {
    int64_t node = kNone;
    int64_t last_used = 0;
    bool moves = false;  // with its request, which nobody else began with
  };
  // The order in which pages are given up: the longest unused, of those the deepest.
  using Eviction = std::tuple<int64_t, int32_t, int64_t>;

  Eviction eviction(int64_t id) const {
    const Node& node = nodes_.at(id);
    return {node.last_used, -node.depth, id};
  }
  void read(int32_t page);
  void unread(int32_t page);
  void replace_page(int64_t id, int32_t page, bool with_drafter);
  void remove(int64_t id);
  std::vector<int64_t> cached(int64_t from, std::span<const int32_t> tokens) const;
  void detach(int32_t snapshot);

  const int32_t page_size_;
  const bool reuse_;
  const bool needs_snapshots_;
  std::vector<int32_t> free_;     // the last one is given next
  std::vector<int32_t> readers_;  // [pages]
  std::vector<int64_t> node_of_;  // [pages], kNone: not published
  std::unordered_map<int64_t, Node> nodes_;
  std::set<Eviction> unread_;  // published pages without a reader
  std::vector<Snapshot> snapshots_;
  int64_t next_node_ = 1;
  int64_t clock_ = 0;
};

}  // namespace trtree
