// How the ranks of a tensor-parallel engine put their parts together.
#pragma once

#include <cstdint>
#include <span>

namespace trtree::cpu {

class Collectives {
 public:
  virtual ~Collectives() = default;
  virtual int32_t rank() const = 0;
  virtual int32_t size() const = 0;
  // Every rank's `mine`, of one length on all of them, to `all` in the order of ranks.
  // All ranks call it as often and in the same order.
  virtual void all_gather(std::span<const float> mine, std::span<float> all) = 0;
};

}  // namespace trtree::cpu
