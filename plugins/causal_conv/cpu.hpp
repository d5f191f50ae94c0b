// The causal convolution on the CPU; README.md says what is computed.
//
// A row's sum runs over its ancestors from the oldest to itself, in float32, wherever they
// lie: in the step or in the committed window. So a tree row has the bits of plain decoding.
#pragma once

#include <cstdint>
#include <span>

#include "plugins/branch_state.hpp"
#include "plugins/cpu_isa.hpp"
#include "plugins/parallel.hpp"

namespace trtree::causal_conv {

struct Shape {
  int64_t channels = 0;
  int64_t window = 0;  // kernel - 1

  int64_t state_size() const { return window * channels; }
};

// float32 [rows, channels] with `stride` floats between rows.
struct Rows {
  float* data = nullptr;
  int64_t stride = 0;
};

// weight: [window + 1, channels], the newest input's taps last. committed: [slots, window,
// channels], oldest first.
void run(const Shape& shape, const float* weight, const float* committed,
         std::span<const branch::Segment> segments, const Rows& x, const Rows& y,
         Parallel& parallel, Isa isa);

// Moves the slot's window along the accepted rows (a path from the committed state).
void commit(const Shape& shape, float* committed, const branch::Segment& segment,
            std::span<const int32_t> rows, const Rows& x);

}  // namespace trtree::causal_conv
