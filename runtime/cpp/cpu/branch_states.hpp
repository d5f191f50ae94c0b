// What requests keep beside KV (convolution windows, recurrences), and what the rows of a
// step leave for commit.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "plugins/branch_state.hpp"
#include "plugins/causal_conv/cpu.hpp"
#include "plugins/gated_delta_net/cpu.hpp"
#include "runtime/cpp/cpu/plan.hpp"
#include "runtime/cpp/cpu/row_ops.hpp"
#include "runtime/cpp/engine.hpp"
#include "runtime/cpp/row_batch.hpp"

namespace trtree::cpu {

class BranchStates {
 public:
  // Memory for `slots` requests and for snapshots of them; what is untouched takes none.
  // `plan` must outlive this. Throws std::runtime_error where there is not enough.
  BranchStates(const Plan& plan, int32_t slots, int32_t snapshots);

  bool any() const { return any_; }

  // The rows of the next run; `batch` must outlive it and its commit.
  void begin(const RowBatch& batch);

  // weight: [window + 1, channels], the newest input's taps last.
  void causal_conv(int32_t state, const float* weight, const Matrix& x, const Matrix& y,
                   Parallel& parallel, Isa isa);
  void gated_delta_net(int32_t state, int64_t key_heads, const gated_delta_net::Operands& operands,
                       const Matrix& y, Parallel& parallel);

  // Moves the states of one segment of the last run along the accepted rows, and keeps those
  // they pass that are to be saved.
  void commit(size_t segment, std::span<const int32_t> rows, std::span<const StateSave> saves);

  void load(int32_t snapshot, int32_t slot);

 private:
  struct State {
    std::unique_ptr<float, decltype(&std::free)> committed{nullptr, &std::free};  // by slot
    std::unique_ptr<float, decltype(&std::free)> saved{nullptr, &std::free};      // by snapshot
    int64_t size = 0;  // floats of one request
    int64_t key_heads = 0;
    std::vector<float> inputs;         // of a convolution: [rows, channels]
    gated_delta_net::Updates updates;  // of a recurrence
  };

  void move(int32_t state, const branch::Segment& segment, std::span<const int32_t> rows);
  causal_conv::Shape conv_shape(int32_t state) const;
  gated_delta_net::Shape delta_shape(int32_t state) const;

  const Plan& plan_;
  bool any_ = false;
  std::vector<State> states_;  // by state index; KV's are empty
  std::vector<branch::Segment> segments_;
  std::vector<branch::Order> orders_;
};

}  // namespace trtree::cpu
