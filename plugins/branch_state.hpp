// State that every row of a step continues from its parent; branch_state.py says what is
// computed. On the CPU rows are visited depth-first, so that few states live at once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace trtree::branch {

// One request's rows. fresh: nothing is committed, so the state is zero whatever the slot
// holds. parents [num_rows]: rows of the segment, -1 the committed state.
struct Segment {
  int32_t first_row = 0;
  int32_t num_rows = 0;
  int32_t slot = 0;
  bool fresh = false;
  std::span<const int32_t> parents;
};

// One row's turn: its parent's state is in buffer `from` (kCommitted: the slot), its own
// goes to buffer `to`, which is `from` where nobody needs the parent's any more.
struct Visit {
  int32_t row = 0;  // of the segment
  int32_t from = 0;
  int32_t to = 0;
};
inline constexpr int32_t kCommitted = -1;

// The order in which to visit a segment's rows, made once per step.
struct Order {
  std::vector<Visit> visits;
  int32_t buffers = 0;  // states at once: 1 for a chain, at most 1 + depth for a tree

  explicit Order(std::span<const int32_t> parents);
};

}  // namespace trtree::branch
