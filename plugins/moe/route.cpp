#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "plugins/moe/moe.hpp"

namespace trtree::moe {
namespace {

constexpr double kTiny = 1e-20;
// Rows per task, so that a task is worth waking a thread for.
constexpr int64_t kGrain = 16;

// Working memory of one thread.
struct Scratch {
  std::vector<double> scores, choices, worth;
  std::vector<char> chosen, open;
};

// Marks the `count` largest of those `open`; of equal ones the first. NaN is never larger.
void mark_largest(const std::vector<double>& values, const std::vector<char>& open, int64_t count,
                  std::vector<char>& marked) {
  marked.assign(values.size(), 0);
  for (int64_t taken = 0; taken < count; ++taken) {
    size_t best = values.size();
    for (size_t i = 0; i < values.size(); ++i) {
      if (marked[i] || !open[i]) continue;
      if (best == values.size() || values[i] > values[best]) best = i;
    }
    marked[best] = 1;
  }
}

// The sum of a group's two largest choices.
double worth(const double* choices, int64_t size) {
  double first = choices[0], second = -std::numeric_limits<double>::infinity();
  for (int64_t i = 1; i < size; ++i) {
    if (choices[i] > first) {
      second = first;
      first = choices[i];
    } else if (choices[i] > second) {
      second = choices[i];
    }
  }
  return first + second;
}

void open_groups(const Routing& routing, Scratch& s) {
  const int64_t size = routing.experts / routing.groups;
  s.worth.resize(routing.groups);
  for (int64_t g = 0; g < routing.groups; ++g) s.worth[g] = worth(&s.choices[g * size], size);
  const std::vector<char> every(routing.groups, 1);
  std::vector<char> best;
  mark_largest(s.worth, every, routing.top_groups, best);
  for (int64_t e = 0; e < routing.experts; ++e) s.open[e] = best[e / size];
}

void score(const Routing& routing, const float* logits, const float* bias, Scratch& s) {
  const int64_t n = routing.experts;
  if (routing.sigmoid) {
    for (int64_t e = 0; e < n; ++e) {
      s.scores[e] = 1.0 / (1.0 + std::exp(-static_cast<double>(logits[e])));
      s.choices[e] = s.scores[e];
    }
  } else {
    const double largest = *std::max_element(logits, logits + n);
    double total = 0;
    for (int64_t e = 0; e < n; ++e) total += s.scores[e] = std::exp(logits[e] - largest);
    for (int64_t e = 0; e < n; ++e) {
      s.scores[e] /= total;
      s.choices[e] = logits[e];  // in the order of the scores, without their rounding
    }
  }
  if (bias == nullptr) return;
  for (int64_t e = 0; e < n; ++e) s.choices[e] = s.scores[e] + bias[e];
}

void route_row(const Routing& routing, const float* logits, const float* bias, Scratch& s,
               float* weights) {
  score(routing, logits, bias, s);
  std::fill(s.open.begin(), s.open.end(), 1);
  if (routing.groups > 1) open_groups(routing, s);
  mark_largest(s.choices, s.open, routing.top_k, s.chosen);
  double total = 0;
  for (int64_t e = 0; e < routing.experts; ++e) {
    if (s.chosen[e]) total += s.scores[e];
  }
  const double divisor = routing.normalize ? total + kTiny : 1.0;
  for (int64_t e = 0; e < routing.experts; ++e) {
    weights[e] = s.chosen[e] ? static_cast<float>(s.scores[e] / divisor * routing.scale) : 0.0f;
  }
}

}  // namespace

void Routing::check() const {
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw std::invalid_argument("routing: " + what);
  };
  require(experts > 0 && groups > 0 && experts % groups == 0,
          std::to_string(experts) + " experts in " + std::to_string(groups) + " groups");
  require(groups == 1 || experts / groups >= 2,
          "groups of " + std::to_string(experts / groups) + " experts");
  require(top_groups >= 1 && top_groups <= groups,
          "top_groups " + std::to_string(top_groups) + " of " + std::to_string(groups));
  const int64_t candidates = top_groups * (experts / groups);
  require(top_k >= 1 && top_k <= candidates,
          "top_k " + std::to_string(top_k) + " of " + std::to_string(candidates) + " candidates");
}

void route(const Routing& routing, Rows logits, int64_t rows, const float* bias, float* weights,
           int64_t weights_stride, Parallel& parallel) {
  routing.check();
  parallel.parallel_for(rows, kGrain, [&](int64_t begin, int64_t end) {
    const auto n = static_cast<size_t>(routing.experts);
    Scratch scratch{std::vector<double>(n), std::vector<double>(n), {}, {}, std::vector<char>(n)};
    for (int64_t r = begin; r < end; ++r) {
      route_row(routing, logits.data + r * logits.stride, bias, scratch,
                weights + r * weights_stride);
    }
  });
}

}  // namespace trtree::moe
