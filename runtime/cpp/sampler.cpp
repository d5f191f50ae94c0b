#include "runtime/cpp/sampler.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <string>

#include "plugins/ddtree/ddtree.hpp"
#include "plugins/ddtree/row_scan.hpp"
#include "runtime/cpp/exp_weights.hpp"
#include "runtime/cpp/philox.hpp"

namespace trtree {

namespace {

using ddtree::kChunk;
static_assert(kChunk == kWeightChunk);

constexpr float kInfinity = std::numeric_limits<float>::infinity();

[[noreturn]] void refuse_row(std::span<const float> logits) {
  for (size_t id = 0; id < logits.size(); ++id) {
    if (std::isnan(logits[id]) || logits[id] == kInfinity) {
      throw std::runtime_error("logit of token " + std::to_string(id) + ": " +
                               (std::isnan(logits[id]) ? "NaN" : "+inf") +
                               "; the target's output has overflowed");
    }
  }
  throw std::runtime_error("every token has logit -inf, so none can be chosen");
}

struct Candidate {
  float logit;
  int32_t id;
  double weight;

  bool ranks_before(const Candidate& other) const {
    return logit != other.logit ? logit > other.logit : id < other.id;
  }
};

// Memory for one call at a time: a vocabulary's worth from the system takes longer than
// all that is done with it.
struct Scratch {
  std::vector<float> processed;  // logits
  std::vector<float> chunk_max;
  std::vector<double> sums;  // of chunks
  struct {
    std::vector<int32_t> ids;
    std::vector<float> logits;
    std::vector<double> weights;
  } gathered;
  std::vector<Candidate> candidates;
  std::vector<Candidate> ranked;

  static Scratch& of_this_thread() {
    static thread_local Scratch scratch;
    return scratch;
  }
};

// A row whose logits are known to be numbers or -inf, and its largest.
class Row {
 public:
  Row(std::span<const float> logits, Scratch& scratch)
      : logits_(logits), chunk_max_(scratch.chunk_max) {
    chunk_max_.resize((logits.size() + kChunk - 1) / kChunk);
    const ddtree::RowScan scan = ddtree::scan_kernels().front().scan(
        logits.data(), static_cast<int32_t>(logits.size()), chunk_max_.data());
    if (std::isnan(scan.sum) || std::isinf(scan.max)) refuse_row(logits);
    max_ = scan.max;
  }

  std::span<const float> logits() const { return logits_; }
  float max() const { return max_; }
  float operator[](int32_t id) const { return logits_[id]; }

  // Of the largest logit, the lowest id.
  int32_t argmax() const {
    const auto chunk = std::find(chunk_max_.begin(), chunk_max_.end(), max_) - chunk_max_.begin();
    const auto first = logits_.begin() + chunk * kChunk;
    return static_cast<int32_t>(std::find(first, logits_.end(), max_) - logits_.begin());
  }

  // Call visit(id) for each token whose logit is `threshold` or more, in order.
  template <class Visit>
  void for_each_at_least(float threshold, Visit visit) const {
    const auto at_least = ddtree::scan_kernels().front().at_least;
    for (size_t chunk = 0; chunk < chunk_max_.size(); ++chunk) {
      if (!(chunk_max_[chunk] >= threshold)) continue;
      const size_t first = chunk * kChunk;
      if (logits_.size() - first < kChunk) {
        for (size_t id = first; id < logits_.size(); ++id) {
          if (logits_[id] >= threshold) visit(static_cast<int32_t>(id));
        }
        continue;
      }
      for (uint64_t bits = at_least(&logits_[first], threshold); bits; bits &= bits - 1) {
        visit(static_cast<int32_t>(first) + std::countr_zero(bits));
      }
    }
  }

 private:
  std::span<const float> logits_;
  std::vector<float>& chunk_max_;
  float max_;
};

// Ids of the k largest logits, equal ones by lower id. 1 <= k <= the vocabulary.
std::vector<int32_t> top_ids(std::span<const float> logits, int32_t k) {
  std::vector<float> unused(k);
  std::vector<int32_t> ids(k);
  ddtree::top_k_log_probs(logits, 1, static_cast<int32_t>(logits.size()), k, 1, unused, ids);
  return ids;
}

// Steps 1 to 3: `logits` themselves where nothing applies, else a copy in `storage`.
std::span<const float> penalized(std::span<const float> logits, const SamplingConfig& config,
                                 const TokenCounts& counts, std::vector<float>& storage) {
  if (config.logit_bias.empty() && !uses_counts(config)) return logits;
  storage.assign(logits.begin(), logits.end());
  for (const auto& [token, bias] : config.logit_bias) storage[token] += bias;
  if (!uses_counts(config)) return storage;
  for (const TokenCounts::Entry& seen : counts.entries()) {
    if (!seen.in_prompt && seen.in_output == 0) continue;
    float& logit = storage[seen.token_id];
    logit = logit > 0 ? logit / config.repetition_penalty : logit * config.repetition_penalty;
    if (seen.in_output == 0) continue;
    logit -=
        config.presence_penalty + static_cast<float>(seen.in_output) * config.frequency_penalty;
  }
  return storage;
}

// Weights of a row's chunks; returns their sum.
double sum_weights(const Row& row, double scale, std::vector<double>& sums) {
  sums.resize((row.logits().size() + kChunk - 1) / kChunk);
  exp_kernels().front().sums(row.logits().data(), static_cast<int32_t>(row.logits().size()),
                             row.max(), scale, sums.data());
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

// The tokens that steps 4 to 7 leave, and their weights, at temperature > 0. Every step keeps
// the first so many in decreasing order of logit (equal ones by lower id), so what is
// left is all down to one last candidate; only that one has to be found, nothing sorted.
class Kept {
 public:
  Kept(const Row& row, const SamplingConfig& config, Scratch& scratch)
      : row_(row),
        scratch_(scratch),
        scale_(1.0 / config.temperature),
        vocab_(static_cast<int32_t>(row.logits().size())),
        everything_(config.top_p >= 1.0f && config.min_p <= 0.0f &&
                    (config.top_k == 0 || config.top_k >= vocab_)) {
    if (everything_) {
      total_ = sum_weights(row, scale_, sums_);
      return;
    }
    if (config.top_k > 0 && config.top_k < vocab_) {
      const int32_t last = top_ids(row.logits(), config.top_k).back();
      gather(row[last]);
      keep_down_to({row[last], last, 0.0});
      if (config.top_p < 1.0f) keep_top_p(config.top_p, weight_of_candidates());
    } else if (config.top_p < 1.0f) {
      const double all = sum_weights(row, scale_, sums_);
      // Tokens that weigh less than this weigh less than 1 - top_p even all together,
      // so none of them is in the nucleus.
      gather(threshold((1.0 - config.top_p) * all / vocab_));
      keep_top_p(config.top_p, all);
    } else {
      gather(threshold(config.min_p));
    }
    const double least = std::log(static_cast<double>(config.min_p));
    std::erase_if(candidates_, [&](const Candidate& c) {
      return (static_cast<double>(c.logit) - row.max()) * scale_ < least;
    });
    total_ = weight_of_candidates();
  }

  // Step 8.
  int32_t draw(double u) const {
    const double target = u * total_;
    double sum = 0.0;
    if (!everything_) {
      for (const Candidate& c : candidates_) {
        sum += c.weight;
        if (sum > target) return c.id;
      }
      return candidates_.back().id;
    }
    size_t chunk = 0;
    while (chunk + 1 < sums_.size() && sum + sums_[chunk] <= target) sum += sums_[chunk++];
    return draw_in_chunk(chunk, sum, target);
  }

  std::vector<double> probabilities() const {
    std::vector<double> probabilities(vocab_);
    if (everything_) {
      kernel_.weights(row_.logits().data(), vocab_, row_.max(), scale_, probabilities.data());
    } else {
      for (const Candidate& c : candidates_) probabilities[c.id] = c.weight;
    }
    for (double& p : probabilities) p /= total_;
    return probabilities;
  }

 private:
  // A logit that no token of this weight lies below.
  float threshold(double weight) const {
    const double logit = row_.max() + std::log(weight) / scale_;
    const double lowest = std::numeric_limits<float>::lowest();
    const auto rounded = static_cast<float>(std::clamp<double>(logit, lowest, row_.max()));
    return std::nextafter(rounded, -kInfinity);
  }

  // Make candidates of the tokens that weigh anything and whose logit is `threshold` or more.
  void gather(float threshold) {
    auto& [ids, logits, weights] = scratch_.gathered;
    ids.clear();
    logits.clear();
    candidates_.clear();
    row_.for_each_at_least(threshold, [&](int32_t id) {
      ids.push_back(id);
      logits.push_back(row_[id]);
    });
    weights.resize(ids.size());
    kernel_.weights(logits.data(), static_cast<int32_t>(ids.size()), row_.max(), scale_,
                    weights.data());
    for (size_t i = 0; i < ids.size(); ++i) {
      if (weights[i] > 0.0) candidates_.push_back({logits[i], ids[i], weights[i]});
    }
  }

  double weight_of_candidates() const {
    double sum = 0.0;
    for (const Candidate& c : candidates_) sum += c.weight;
    return sum;
  }

  void keep_down_to(const Candidate& last) {
    std::erase_if(candidates_, [&](const Candidate& c) { return last.ranks_before(c); });
  }

  // Find the range of logits in which the last token of the nucleus lies, then halve it until
  // one token is left.
  void keep_top_p(float top_p, double all) {
    const auto bucket = [&](const Candidate& c) {
      constexpr float kBucketsPerUnit = 64.0f;  // of the logit times scale_
      return static_cast<size_t>((row_.max() - c.logit) * scale_ * kBucketsPerUnit);
    };
    std::vector<double> weight_of_bucket;
    for (const Candidate& c : candidates_) {
      const size_t b = bucket(c);
      if (b >= weight_of_bucket.size()) weight_of_bucket.resize(b + 1);
      weight_of_bucket[b] += c.weight;
    }
    double before = 0.0;  // weight of what ranks before `first`, below
    size_t last = 0;
    while (last + 1 < weight_of_bucket.size() && before + weight_of_bucket[last] < top_p * all) {
      before += weight_of_bucket[last++];
    }
    auto& ranked = scratch_.ranked;
    ranked.clear();
    std::copy_if(candidates_.begin(), candidates_.end(), std::back_inserter(ranked),
                 [&](const Candidate& c) { return bucket(c) == last; });
    auto first = ranked.begin();
    auto end = ranked.end();
    while (end - first > 1) {
      const auto middle = first + (end - first) / 2;
      std::nth_element(first, middle, end,
                       [](const Candidate& a, const Candidate& b) { return a.ranks_before(b); });
      double half = 0.0;
      for (auto c = first; c != middle; ++c) half += c->weight;
      if (before + half < top_p * all) {
        before += half;
        first = middle;
      } else {
        end = middle;
      }
    }
    keep_down_to(*first);
  }

  int32_t draw_in_chunk(size_t chunk, double sum, double target) const {
    const size_t first = chunk * kChunk;
    const auto count = static_cast<int32_t>(std::min<size_t>(kChunk, vocab_ - first));
    double weights[kChunk];
    kernel_.weights(&row_.logits()[first], count, row_.max(), scale_, weights);
    int32_t last = 0;  // of those that weigh anything, should rounding leave the sum short
    for (int32_t i = 0; i < count; ++i) {
      sum += weights[i];
      if (sum > target) return static_cast<int32_t>(first) + i;
      if (weights[i] > 0.0) last = i;
    }
    return static_cast<int32_t>(first) + last;
  }

  const Row& row_;
  Scratch& scratch_;
  std::vector<double>& sums_ = scratch_.sums;                 // of each chunk, if everything stays
  std::vector<Candidate>& candidates_ = scratch_.candidates;  // otherwise; by id
  const ExpKernel kernel_ = exp_kernels().front();
  const double scale_;
  const int32_t vocab_;
  const bool everything_;  // nothing is cut
  double total_;
};

}  // namespace

void check_sampling(const SamplingConfig& config, int32_t vocab_size) {
  // NaN is in no range.
  const auto check = [](const std::string& name, auto value, bool good, const char* range) {
    if (good) return;
    std::ostringstream text;
    text << name << " must be " << range << ", not " << value;
    throw std::invalid_argument(text.str());
  };
  const auto within = [](float value, float least, float most) {
    return value >= least && value <= most;
  };
  check("temperature", config.temperature, within(config.temperature, 0.0f, 100.0f),
        "from 0 to 100");
  check("top_k", config.top_k, config.top_k >= 0, "0 (all tokens) or more");
  check("top_p", config.top_p, config.top_p > 0.0f && config.top_p <= 1.0f,
        "above 0 and at most 1");
  check("min_p", config.min_p, within(config.min_p, 0.0f, 1.0f), "from 0 to 1");
  check("repetition_penalty", config.repetition_penalty,
        within(config.repetition_penalty, 0.01f, 100.0f), "from 0.01 to 100");
  check("presence_penalty", config.presence_penalty, within(config.presence_penalty, -2.0f, 2.0f),
        "from -2 to 2");
  check("frequency_penalty", config.frequency_penalty,
        within(config.frequency_penalty, -2.0f, 2.0f), "from -2 to 2");
  for (const auto& [token, bias] : config.logit_bias) {
    const std::string name = "logit_bias of token " + std::to_string(token);
    if (token < 0 || token >= vocab_size) {
      throw std::invalid_argument(name + ": the vocabulary has " + std::to_string(vocab_size) +
                                  " entries");
    }
    check(name, bias, within(bias, -100.0f, 100.0f), "from -100 to 100");
  }
}

bool uses_counts(const SamplingConfig& config) {
  return config.repetition_penalty != 1.0f || config.presence_penalty != 0.0f ||
         config.frequency_penalty != 0.0f;
}

int32_t choose(std::span<const float> logits, const SamplingConfig& config,
               const TokenCounts& counts, int64_t position) {
  Scratch& scratch = Scratch::of_this_thread();
  const Row row(penalized(logits, config, counts, scratch.processed), scratch);
  if (config.temperature == 0.0f) return row.argmax();
  return Kept(row, config, scratch).draw(uniform(config.seed, position));
}

std::vector<double> distribution(std::span<const float> logits, const SamplingConfig& config,
                                 const TokenCounts& counts) {
  Scratch& scratch = Scratch::of_this_thread();
  const Row row(penalized(logits, config, counts, scratch.processed), scratch);
  if (config.temperature > 0.0f) return Kept(row, config, scratch).probabilities();
  std::vector<double> probabilities(logits.size());
  probabilities[row.argmax()] = 1.0;
  return probabilities;
}

TokenLogProbs log_probs(std::span<const float> logits, int32_t token, int32_t top) {
  Scratch& scratch = Scratch::of_this_thread();
  const Row row(logits, scratch);
  const double lse = row.max() + std::log(sum_weights(row, 1.0, scratch.sums));
  const auto log_prob = [&](int32_t id) { return static_cast<float>(row[id] - lse); };

  const auto before = logits.first(token);
  const auto after = logits.subspan(token);
  const auto rank = std::count_if(before.begin(), before.end(),
                                  [own = row[token]](float logit) { return logit >= own; }) +
                    std::count_if(after.begin(), after.end(),
                                  [own = row[token]](float logit) { return logit > own; });
  TokenLogProbs result{log_prob(token), static_cast<int32_t>(rank), {}};
  if (top <= 0) return result;
  for (const int32_t id : top_ids(logits, std::min(top, static_cast<int32_t>(logits.size())))) {
    if (row[id] > -kInfinity) result.top.emplace_back(id, log_prob(id));
  }
  return result;
}

}  // namespace trtree
