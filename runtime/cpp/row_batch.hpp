// The one shape of batch: prefill, plain decoding, chain and tree verification
// are all ragged batches of rows.
#pragma once

#include <cstdint>
#include <vector>

namespace trtree {

// Where one request lives in an engine.
struct Sequence {
  int64_t request_id = 0;
  // Dense index below Capabilities::max_batch_size. Engines keep per-request
  // state here: contiguous KV, recurrent state, convolution windows. A step
  // with committed_length 0 starts the slot afresh.
  int32_t slot = 0;
  // Tokens whose KV, recurrent state and drafter context are committed.
  int32_t committed_length = 0;
  // Page table in token order; covers committed_length plus the rows of the
  // step and the drafter's block. Empty for engines with contiguous KV.
  std::vector<int32_t> pages;
};

// The rows of one request within a step.
struct Segment {
  Sequence sequence;
  int32_t first_row = 0;
  int32_t num_rows = 0;
};

// What one request asks to be run: token_ids [n], parents [n]. parents[i] < i is
// the row that row i continues, -1 the committed prefix.
struct SegmentRequest {
  Sequence sequence;
  std::vector<int32_t> token_ids;
  std::vector<int32_t> parents;
  // Rows (within the segment) whose argmax is wanted, increasing.
  std::vector<int32_t> output_rows;
  bool needs_logits = false;
};

// A ragged batch. Row r of a segment with committed length c:
//   position = c + depth(r)         (siblings share it; RoPE uses it)
//   KV slot  = c + r - first_row    (sequential; the cache uses it)
//   may see    all c committed tokens, its ancestors and itself (packed_mask)
// Built once per step and never changed after.
class RowBatch {
 public:
  explicit RowBatch(std::vector<SegmentRequest> requests);

  int32_t num_rows() const { return static_cast<int32_t>(token_ids.size()); }

  std::vector<Segment> segments;
  std::vector<int32_t> token_ids;  // [rows]
  std::vector<int32_t> positions;  // [rows]
  std::vector<int32_t> parents;    // [rows] within the segment, -1: committed prefix
  // [rows, mask_words]: bit j (LSB first) of word j / 32 in row i: row i sees row j
  // of its own segment. mask_words fits the widest segment.
  std::vector<int32_t> packed_mask;
  int32_t mask_words = 0;
  std::vector<int32_t> output_rows;   // [outputs] global row indices, increasing
  std::vector<uint8_t> needs_logits;  // [outputs]
};

}  // namespace trtree
