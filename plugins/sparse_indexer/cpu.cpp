#include "plugins/sparse_indexer/cpu.hpp"

#include <atomic>
#include <cmath>
#include <stdexcept>

#include "plugins/sparse_indexer/cpu_kernel.hpp"

namespace trtree::indexer {

namespace {

TileKernel kernel_of(Isa isa) {
#ifdef TRTREE_X86_KERNELS
  if (isa == Isa::kAvx512) return kAvx512Tile;
  if (isa == Isa::kAvx2) return kAvx2Tile;
#endif
  (void)isa;
  return kPortableTile;
}

// A row that sees more keys than it may choose.
struct Chooser {
  const attention::Segment* segment;
  int32_t row;          // within the segment
  int64_t num_keys;     // visible
  int64_t first_score;  // in the scores of all choosers
};

struct Candidate {
  float score;
  int32_t index;  // in the row's list of visible keys
};

// The slot of a row's i-th visible key.
int32_t slot_of(const attention::Segment& segment, std::span<const int32_t> path, int64_t i) {
  const int64_t prefix = segment.prefix_length;
  return static_cast<int32_t>(i < prefix ? i : prefix + path[i - prefix]);
}

// False if a score is NaN.
bool choose(const Chooser& row, std::span<const int32_t> path, const float* scores,
            std::span<int32_t> chosen) {
  thread_local std::vector<Candidate> candidates;
  candidates.resize(row.num_keys);
  for (int64_t i = 0; i < row.num_keys; ++i) {
    if (std::isnan(scores[i])) return false;
    candidates[i] = {scores[i], static_cast<int32_t>(i)};
  }
  const auto end = candidates.begin() + static_cast<int64_t>(chosen.size());
  std::nth_element(candidates.begin(), end - 1, candidates.end(),
                   [](const Candidate& a, const Candidate& b) {
                     return a.score != b.score ? a.score > b.score : a.index < b.index;
                   });
  std::sort(candidates.begin(), end,
            [](const Candidate& a, const Candidate& b) { return a.index < b.index; });
  for (size_t i = 0; i < chosen.size(); ++i) {
    chosen[i] = slot_of(*row.segment, path, candidates[i].index);
  }
  return true;
}

}  // namespace

void select(const Index& index, const std::string& op, std::span<int32_t> selection,
            Parallel& parallel, Isa isa) {
  if (index.keys.dim % kLanes != 0) {
    throw std::invalid_argument("an indexer needs keys of a multiple of " + std::to_string(kLanes) +
                                " numbers, not " + std::to_string(index.keys.dim));
  }
  std::fill(selection.begin(), selection.end(), -1);
  std::vector<Chooser> choosers;
  int64_t num_scores = 0;
  for (const attention::Segment& segment : index.segments) {
    for (int32_t row = 0; row < segment.num_rows; ++row) {
      const auto path = index.visibility->row(segment.first_row + row);
      const int64_t num_keys = segment.prefix_length + static_cast<int64_t>(path.size());
      if (num_keys > index.top_k) {
        choosers.push_back({&segment, row, num_keys, num_scores});
        num_scores += (num_keys + kLanes - 1) / kLanes * kLanes;
        continue;
      }
      int32_t* const all = selection.data() + (segment.first_row + row) * index.top_k;
      for (int64_t i = 0; i < num_keys; ++i) all[i] = slot_of(segment, path, i);
    }
  }
  std::vector<float> scores(num_scores);
  std::vector<Tile> tiles;
  for (const Chooser& row : choosers) {
    for (int64_t first = 0; first < row.num_keys; first += kTileKeys) {
      tiles.push_back({row.segment, row.row, first, std::min(kTileKeys, row.num_keys - first),
                       scores.data() + row.first_score + first});
    }
  }
  const TileKernel kernel = kernel_of(isa);
  parallel.parallel_for(static_cast<int64_t>(tiles.size()), 8, [&](int64_t begin, int64_t end) {
    thread_local Scratch scratch;
    for (int64_t i = begin; i < end; ++i) kernel(index, tiles[i], scratch);
  });
  std::atomic<int32_t> nan_row = -1;
  parallel.parallel_for(static_cast<int64_t>(choosers.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Chooser& row = choosers[i];
      const int32_t at = row.segment->first_row + row.row;
      const auto chosen = selection.subspan(at * index.top_k, index.top_k);
      if (!choose(row, index.visibility->row(at), scores.data() + row.first_score, chosen)) {
        nan_row = at;
      }
    }
  });
  if (nan_row >= 0) {
    throw std::runtime_error(op + ": NaN in the scores of row " + std::to_string(nan_row) +
                             "; a weight or an activation overflowed");
  }
}

}  // namespace trtree::indexer
