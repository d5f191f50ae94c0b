#include "runtime/cpp/row_batch.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace trtree {

namespace {

[[noreturn]] void refuse(const Sequence& sequence, const std::string& what) {
  throw std::invalid_argument("request " + std::to_string(sequence.request_id) + ": " + what);
}

}  // namespace

RowBatch::RowBatch(std::vector<SegmentRequest> requests) {
  size_t widest = 0;
  for (const SegmentRequest& request : requests) {
    widest = std::max(widest, request.token_ids.size());
  }
  mask_words = static_cast<int32_t>((widest + 31) / 32);
  for (SegmentRequest& request : requests) {
    const auto rows = static_cast<int32_t>(request.token_ids.size());
    if (rows == 0) refuse(request.sequence, "a segment needs at least one row");
    if (request.parents.size() != request.token_ids.size()) {
      refuse(request.sequence, std::to_string(request.parents.size()) + " parents for " +
                                   std::to_string(rows) + " rows");
    }
    Segment segment{std::move(request.sequence), num_rows(), rows};
    const size_t words = mask_words;
    packed_mask.resize(packed_mask.size() + rows * words, 0);
    uint32_t* const mask =
        reinterpret_cast<uint32_t*>(packed_mask.data()) + segment.first_row * words;
    for (int32_t row = 0; row < rows; ++row) {
      const int32_t parent = request.parents[row];
      if (parent < -1 || parent >= row) {
        refuse(segment.sequence, "row " + std::to_string(row) + " has parent " +
                                     std::to_string(parent) + "; a parent comes before its row");
      }
      uint32_t* const own = mask + row * words;
      if (parent >= 0) {
        const uint32_t* const inherited = mask + parent * words;
        std::copy(inherited, inherited + words, own);
      }
      own[row / 32] |= uint32_t{1} << (row % 32);
      positions.push_back(parent < 0 ? segment.sequence.committed_length
                                     : positions[segment.first_row + parent] + 1);
      token_ids.push_back(request.token_ids[row]);
      parents.push_back(parent);
    }
    int32_t previous = -1;
    for (const int32_t row : request.output_rows) {
      if (row <= previous || row >= rows) {
        refuse(segment.sequence, "output row " + std::to_string(row) + " of " +
                                     std::to_string(rows) + "; output rows increase");
      }
      previous = row;
      output_rows.push_back(segment.first_row + row);
      needs_logits.push_back(request.needs_logits ? 1 : 0);
    }
    segments.push_back(std::move(segment));
  }
}

}  // namespace trtree
