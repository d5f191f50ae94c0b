// The gated delta rule on the CPU; README.md says what is computed.
//
// Rows are visited depth-first, each moving its parent's state on with the same arithmetic
// as plain decoding; commit repeats the accepted rows' updates from what the step kept. So
// outputs and committed states have the bits of plain decoding.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plugins/branch_state.hpp"
#include "plugins/parallel.hpp"

namespace trtree::gated_delta_net {

struct Shape {
  int64_t key_heads = 0;
  int64_t value_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;

  int64_t head_state() const { return key_dim * value_dim; }
  int64_t state_size() const { return value_heads * head_state(); }
  int64_t keys() const { return key_heads * key_dim; }
  int64_t values() const { return value_heads * value_dim; }
};

// float32 rows of some width, `stride` floats apart.
struct Rows {
  const float* data = nullptr;
  int64_t stride = 0;
};

struct Operands {
  Rows q, k;                     // [rows, key_heads, key_dim]
  Rows v;                        // [rows, value_heads, value_dim]
  Rows a, b;                     // [rows, value_heads]
  const float* gates = nullptr;  // [2, value_heads]: A_log, dt_bias
};

// What the rows of a step did to the state, for commit.
struct Updates {
  std::vector<float> keys;   // [rows, key_heads, key_dim], of unit length
  std::vector<float> added;  // u: [rows, value_heads, value_dim]
  std::vector<float> decay;  // exp(g): [rows, value_heads]
};

// committed: [slots, value_heads, key_dim, value_dim]. orders: one per segment. output:
// [rows, value_heads, value_dim], output_stride floats between rows.
void run(const Shape& shape, const Operands& operands, const float* committed,
         std::span<const branch::Segment> segments, std::span<const branch::Order> orders,
         Updates& updates, float* output, int64_t output_stride, Parallel& parallel);

// Repeats the accepted rows' updates (a path from the committed state) on the slot's state.
void commit(const Shape& shape, float* committed, const branch::Segment& segment,
            std::span<const int32_t> rows, const Updates& updates);

}  // namespace trtree::gated_delta_net
