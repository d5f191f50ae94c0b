// Tree attention on the CPU over paged KV, float32 or E4M3; contract.py says what is computed.
//
// A row's output is a function of its query and of its visible keys and values in
// position order (the prefix, then its ancestors, then itself) and of nothing else:
// scores, softmax and the weighted sum run over that list in one fixed order. So a tree
// row gives the bits of plain decoding, whatever batch, pages or threads it runs with. What is
// E4M3 is decoded first, exactly, and scaled last: scores by k_scale, the result by v_scale.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "plugins/cpu_isa.hpp"
#include "plugins/parallel.hpp"

namespace trtree::attention {

enum class KvType { kFloat32, kE4m3 };

inline int64_t item_bytes(KvType type) { return type == KvType::kFloat32 ? 4 : 1; }

// One layer's cache: k and v [num_pages, heads, page_size, head_dim]. The keys of one head
// lie together, so that reading them fills whole memory pages instead of touching one each.
struct PagedKv {
  std::byte* k = nullptr;
  std::byte* v = nullptr;
  int32_t page_size = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;
  KvType type = KvType::kFloat32;
  float k_scale = 1;  // E4M3: a key is code * k_scale
  float v_scale = 1;

  // Offset of a slot's first number of one head, in numbers.
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

// Write rows [begin, end) of k, v [rows, kv heads, head_dim] into their slots; as E4M3, they are
// x / scale to nearest even, saturated. head_dim is then a multiple of 16.
void append(const PagedKv& cache, std::span<const Segment> segments, const Heads& k, const Heads& v,
            int64_t begin, int64_t end, Isa isa);

// n numbers as a cache of this type and scale keeps them, and back; n is a multiple of 16. What
// append and attend do on their way, for tests.
void to_kv(KvType type, const float* x, int64_t n, float scale, std::byte* to, Isa isa);
void from_kv(KvType type, const std::byte* from, int64_t n, float scale, float* x, Isa isa);

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
