#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

#include "plugins/ddtree/ddtree.hpp"
#include "plugins/ddtree/row_scan.hpp"
#include "plugins/ddtree/worker_pool.hpp"

namespace trtree::ddtree {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int32_t kMaxThreads = 8;  // a row takes 50 us or so: too little for more

// Orders candidates as integers: the larger logit first, then the lower id. -0 is 0.
uint64_t key_of(float logit, int32_t id) {
  const auto bits = std::bit_cast<uint32_t>(logit + 0.0f);
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return uint64_t{ordered} << 32 | ~static_cast<uint32_t>(id);
}

int32_t id_of(uint64_t key) { return static_cast<int32_t>(~static_cast<uint32_t>(key)); }

// Ranks rows for one thread; all its memory is taken beforehand, so that no helper can
// throw.
class RowRanker {
 public:
  RowRanker(int32_t vocab, int32_t top_k)
      : vocab_(vocab),
        top_k_(top_k),
        chunk_max_((vocab + kChunk - 1) / kChunk),
        groups_(chunk_max_.size()),
        candidates_(std::min<size_t>(vocab, 4 * size_t(top_k) + 1024) + kChunk) {}

  // False where the row has no log-sum-exp.
  bool rank(const float* logits, float* log_probs, int32_t* token_ids) {
    const RowScan row = kernel_.scan(logits, vocab_, chunk_max_.data());
    if (std::isnan(row.sum) || std::isinf(row.max)) return false;
    const auto lse = static_cast<float>(row.max + std::log(row.sum));
    collect(logits);
    for (int32_t r = 0; r < top_k_; ++r) {
      token_ids[r] = id_of(candidates_[r]);
      log_probs[r] = logits[token_ids[r]] - lse;
    }
    return true;
  }

 private:
  // A lower bound on the top_k-th largest logit: top_k groups of chunks hold one at
  // least as large. Four groups per rank keep the bound close and cheap.
  float lower_bound() {
    const size_t k = top_k_;
    const size_t merged = std::max<size_t>(1, chunk_max_.size() / (4 * k));
    size_t num_groups = 0;
    for (size_t at = 0; at < chunk_max_.size(); at += merged) {
      const size_t end = std::min(at + merged, chunk_max_.size());
      groups_[num_groups++] = *std::max_element(&chunk_max_[at], chunk_max_.data() + end);
    }
    if (num_groups < k) return -kInfinity;
    const auto end = groups_.begin() + num_groups;
    std::nth_element(groups_.begin(), groups_.begin() + (k - 1), end, std::greater<>());
    return groups_[k - 1];
  }

  uint64_t at_least(const float* logits, int32_t first, float threshold) const {
    if (vocab_ - first >= kChunk) return kernel_.at_least(logits + first, threshold);
    uint64_t bits = 0;
    for (int32_t id = first; id < vocab_; ++id) {
      bits |= uint64_t{logits[id] >= threshold} << (id - first);
    }
    return bits;
  }

  void keep_best() {
    if (count_ <= size_t(top_k_)) return;
    const auto first = candidates_.begin();
    std::nth_element(first, first + (top_k_ - 1), first + count_, std::greater<>());
    count_ = top_k_;
  }

  // Leaves the best top_k candidates, in order, at the front.
  void collect(const float* logits) {
    float threshold = lower_bound();
    count_ = 0;
    for (size_t chunk = 0; chunk < chunk_max_.size(); ++chunk) {
      if (!(chunk_max_[chunk] >= threshold)) continue;
      if (count_ + kChunk > candidates_.size()) {
        keep_best();
        // Later ids must be larger than the worst kept; a tie loses to it.
        const float worst = logits[id_of(candidates_[top_k_ - 1])];
        threshold = std::nextafter(worst, kInfinity);
      }
      const auto first = static_cast<int32_t>(chunk) * kChunk;
      for (uint64_t bits = at_least(logits, first, threshold); bits; bits &= bits - 1) {
        const int32_t id = first + std::countr_zero(bits);
        candidates_[count_++] = key_of(logits[id], id);
      }
    }
    keep_best();
    std::sort(candidates_.begin(), candidates_.begin() + top_k_, std::greater<>());
  }

  ScanKernel kernel_ = scan_kernels().front();
  int32_t vocab_;
  int32_t top_k_;
  std::vector<float> chunk_max_;
  std::vector<float> groups_;
  std::vector<uint64_t> candidates_;
  size_t count_ = 0;
};

[[noreturn]] void refuse_row(std::span<const float> row, int32_t depth) {
  const std::string where = "logits at depth " + std::to_string(depth);
  for (size_t id = 0; id < row.size(); ++id) {
    if (std::isnan(row[id]) || row[id] == kInfinity) {
      throw std::invalid_argument(where + ", token " + std::to_string(id) + ": " +
                                  (std::isnan(row[id]) ? "NaN" : "+inf") +
                                  "; the drafter's output has overflowed (float16?)");
    }
  }
  throw std::invalid_argument(where + ": every token is -inf, so none can be drafted");
}

int32_t usable_threads(int32_t wanted, int32_t depth) {
  if (wanted <= 0) {
    static const auto processors = static_cast<int32_t>(std::thread::hardware_concurrency());
    wanted = std::min(processors, kMaxThreads);
  }
  return std::clamp(wanted, 1, std::max(depth, 1));
}

}  // namespace

void top_k_log_probs(std::span<const float> logits, int32_t depth, int32_t vocab, int32_t top_k,
                     int32_t num_threads, std::span<float> log_probs,
                     std::span<int32_t> token_ids) {
  if (depth < 0 || vocab < 1 || logits.size() != size_t(depth) * vocab) {
    throw std::invalid_argument("logits: " + std::to_string(logits.size()) + " values are not [" +
                                std::to_string(depth) + ", " + std::to_string(vocab) + "]");
  }
  if (top_k < 1 || top_k > vocab) {
    throw std::invalid_argument("top_k must be from 1 to the vocabulary's " +
                                std::to_string(vocab) + ", not " + std::to_string(top_k));
  }
  const size_t size = size_t(depth) * top_k;
  if (log_probs.size() != size || token_ids.size() != size) {
    throw std::invalid_argument(
        "log_probs and token_ids must hold depth x top_k = " + std::to_string(size) + " values");
  }
  const int32_t threads = usable_threads(num_threads, depth);
  std::vector<RowRanker> rankers(threads, RowRanker(vocab, top_k));
  std::atomic<int32_t> next_row{0};
  std::atomic<int32_t> bad_row{depth};  // the first
  WorkerPool::shared().run(threads, [&](int32_t thread) {
    for (int32_t row; (row = next_row.fetch_add(1)) < depth;) {
      const size_t out = size_t(row) * top_k;
      if (!rankers[thread].rank(&logits[size_t(row) * vocab], &log_probs[out], &token_ids[out])) {
        for (int32_t seen = bad_row; row < seen && !bad_row.compare_exchange_weak(seen, row);) {
        }
      }
    }
  });
  if (bad_row < depth) refuse_row(logits.subspan(size_t(bad_row) * vocab, vocab), bad_row);
}

}  // namespace trtree::ddtree
