#include "runtime/cpp/linear_bench.hpp"

#include <algorithm>
#include <chrono>

namespace trtree::bench {
namespace {

// Pseudo-random values between -1 and 1.
std::vector<float> activations(int64_t size) {
  std::vector<float> x(size);
  uint32_t state = 1;
  for (float& value : x) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<float>(state >> 8) * 0x1p-23f - 1.0f;
  }
  return x;
}

template <typename Run>
double seconds(const Run& run) {
  const auto start = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double time_step(const std::vector<StepLinear>& linears, int64_t rows, bool bf16,
                 Parallel& parallel, Isa isa) {
  constexpr float kInputScale = 1.0f / (6 * 448);
  int64_t widest_input = 0, widest_output = 0;
  for (const StepLinear& linear : linears) {
    widest_input = std::max(widest_input, linear.weight.in_features);
    widest_output = std::max(widest_output, linear.weight.out_features);
  }
  const std::vector<float> x = activations(rows * widest_input);
  std::vector<float> y(rows * widest_output);
  nvfp4::Input input;
  return seconds([&] {
    for (const auto& [weight, same_input] : linears) {
      const int64_t k = weight.in_features;
      if (!same_input && bf16) {
        input.round_to_bf16(x.data(), rows, k, k, parallel, isa);
      } else if (!same_input) {
        input.quantize(x.data(), rows, k, k, kInputScale, parallel, isa);
      }
      nvfp4::linear(weight, input, {y.data(), weight.out_features}, parallel, isa);
    }
  });
}

double time_dense(const dense::Weight& weight, int64_t rows, Parallel& parallel, Isa isa) {
  const int64_t k = weight.in_features;
  const std::vector<float> x = activations(rows * k);
  std::vector<float> y(rows * weight.out_features);
  dense::Input input;
  return seconds([&] {
    input.assign(x.data(), rows, k, k);
    dense::linear(weight, input, {y.data(), weight.out_features}, parallel, isa);
  });
}

}  // namespace trtree::bench
