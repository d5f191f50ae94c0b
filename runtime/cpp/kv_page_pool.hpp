// Who owns which KV page. One page holds the target's and the drafter's KV of
// page_size tokens, all layers.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace trtree {

class KvPagePool {
 public:
  explicit KvPagePool(int32_t num_pages) {
    free_.reserve(num_pages);
    for (int32_t page = num_pages - 1; page >= 0; --page) free_.push_back(page);
  }

  // `count` pages, or nothing if there are not that many.
  std::optional<std::vector<int32_t>> allocate(int32_t count) {
    if (count > num_free()) return std::nullopt;
    std::vector<int32_t> pages(free_.rbegin(), free_.rbegin() + count);
    free_.resize(free_.size() - count);
    return pages;
  }

  void release(const std::vector<int32_t>& pages) {
    free_.insert(free_.end(), pages.rbegin(), pages.rend());
  }

  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }

 private:
  std::vector<int32_t> free_;  // the last one is given next
};

}  // namespace trtree
