#include "plugins/branch_state.hpp"

namespace trtree::branch {

Order::Order(std::span<const int32_t> parents) {
  const auto rows = static_cast<int32_t>(parents.size());
  // Children as linked lists; filled from the back, so that each begins with its first.
  std::vector<int32_t> first(rows + 1, -1), next(rows, -1);
  for (int32_t row = rows - 1; row >= 0; --row) {
    int32_t& head = first[parents[row] + 1];
    next[row] = head;
    head = row;
  }
  visits.reserve(rows);
  std::vector<int32_t> free;
  std::vector<int32_t> buffer(rows);
  std::vector<int32_t> pending;  // rows to visit, the next one last
  if (first[0] >= 0) pending.push_back(first[0]);
  while (!pending.empty()) {
    const int32_t row = pending.back();
    pending.pop_back();
    if (next[row] >= 0) pending.push_back(next[row]);  // after all below this row
    const int32_t from = parents[row] < 0 ? kCommitted : buffer[parents[row]];
    // The last child takes its parent's buffer over.
    if (from != kCommitted && next[row] < 0) {
      buffer[row] = from;
    } else if (!free.empty()) {
      buffer[row] = free.back();
      free.pop_back();
    } else {
      buffer[row] = buffers++;
    }
    visits.push_back({row, from, buffer[row]});
    if (first[row + 1] >= 0) {
      pending.push_back(first[row + 1]);
    } else {
      free.push_back(buffer[row]);
    }
  }
}

}  // namespace trtree::branch
