// Tree attention on the CPU over paged float32 KV; contract.py says what is computed.
//
// A row's output is a function of its query and of its visible keys and values in
// position order (the prefix, then its ancestors, then itself) and of nothing else:
// scores, softmax and the weighted sum run over that list in one fixed order. So a tree
// row gives the bits of plain decoding, whatever batch, pages or threads it runs with.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plugins/cpu_isa.hpp"
#include "plugins/parallel.hpp"

namespace trtree::attention {

// One layer's cache: k and v [num_pages, heads, page_size, head_dim]. The keys of one head
// lie together, so that reading them fills whole memory pages instead of touching one each.
struct PagedKv {
  float* k = nullptr;
  float* v = nullptr;
  int32_t page_size = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;

  // Offset of a slot's first float of one head.
  int64_t at(std::span<const int32_t> pages, int64_t slot, int64_t head) const {
    return ((pages[slot / page_size] * heads + head) * page_size + slot % page_size) * head_dim;
  }
};

// One request's rows; row i stands in slot prefix_length + i.
struct Segment {
  int32_t first_row = 0;
  int32_t num_rows = 0;
  int32_t prefix_length = 0;
  std::span<const int32_t> pages;
};

// Which rows of its own segment each row sees, in position order; made once per step.
class Visibility {
 public:
  // packed_mask [rows, mask_words] as in RowBatch.
  void assign(std::span<const Segment> segments, std::span<const int32_t> packed_mask,
              int32_t mask_words);
  // Blocks of a drafter: every row sees its whole block, or with `causal` the rows up to itself.
  void assign_blocks(std::span<const Segment> segments, bool causal);

  std::span<const int32_t> row(int32_t row) const {
    return {seen_.data() + first_[row], static_cast<size_t>(first_[row + 1] - first_[row])};
  }

 private:
  std::vector<int32_t> seen_;
  std::vector<int64_t> first_;
};

// float32 [rows, heads, head_dim] with `stride` floats between rows.
struct Heads {
  const float* data;
  int64_t stride;
};

// Write rows [begin, end) of k, v [rows, kv heads, head_dim] into their slots.
void append(const PagedKv& cache, std::span<const Segment> segments, const Heads& k, const Heads& v,
            int64_t begin, int64_t end);

struct Attention {
  PagedKv cache;
  std::span<const Segment> segments;
  const Visibility* visibility = nullptr;
  std::span<const int32_t> positions;  // [rows]
  Heads q;
  int64_t query_heads = 0;
  float scale = 1;
  int32_t window = 0;  // see keys at positions above position(row) - window; 0: all
  float* output = nullptr;
  int64_t output_stride = 0;
};

// Throws std::invalid_argument unless head_dim is a multiple of 16.
void attend(const Attention& attention, Parallel& parallel, Isa isa);

// Move the slots of the accepted rows (increasing) right behind the prefix.
void commit(const PagedKv& cache, const Segment& segment, std::span<const int32_t> rows);

}  // namespace trtree::attention
