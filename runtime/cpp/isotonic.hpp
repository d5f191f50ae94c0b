// Least-squares fits to an order: pool adjacent violators (Ayer et al., "An empirical
// distribution function for sampling with incomplete information", 1955).
#pragma once

#include <span>
#include <vector>

namespace trtree {

// The non-increasing sequence nearest to `values`, each weighted.
inline std::vector<double> non_increasing_fit(std::span<const double> values,
                                              std::span<const double> weights) {
  struct Block {
    double mean;
    double weight;
    size_t count;
  };
  std::vector<Block> blocks;
  for (size_t i = 0; i < values.size(); ++i) {
    Block block{values[i], weights[i], 1};
    while (!blocks.empty() && blocks.back().mean < block.mean) {
      const Block& last = blocks.back();
      const double weight = last.weight + block.weight;
      block.mean = (last.mean * last.weight + block.mean * block.weight) / weight;
      block.weight = weight;
      block.count += last.count;
      blocks.pop_back();
    }
    blocks.push_back(block);
  }
  std::vector<double> fit;
  for (const Block& block : blocks) fit.insert(fit.end(), block.count, block.mean);
  return fit;
}

// The non-decreasing sequence nearest to `values`, each weighted.
inline std::vector<double> non_decreasing_fit(std::span<const double> values,
                                              std::span<const double> weights) {
  std::vector<double> negated(values.begin(), values.end());
  for (double& value : negated) value = -value;
  std::vector<double> fit = non_increasing_fit(negated, weights);
  for (double& value : fit) value = -value;
  return fit;
}

}  // namespace trtree
