// The threads of the CPU engine: one pool, shared by all its kernels.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "plugins/parallel.hpp"

namespace trtree {

// The calling thread works too, so a pool of n owns n - 1 threads. They spin for a
// few tens of microseconds after each piece of work, as the next linear of a step
// follows at once, and then sleep in the kernel. Calls of parallel_for from
// several threads take turns. A thread that wakes too late is not waited for.
class ThreadPool final : public Parallel {
 public:
  // Throws std::invalid_argument unless 1 <= num_threads <= 256.
  explicit ThreadPool(int num_threads);
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const override { return static_cast<int>(workers_.size()) + 1; }
  void parallel_for(int64_t n, int64_t grain, RangeFn fn) override;

 private:
  void work();
  void take_ranges(RangeFn fn);

  std::mutex turn_;
  // The job; written only while it is closed and no worker is inside.
  const RangeFn* fn_ = nullptr;
  int64_t n_ = 0;
  int64_t grain_ = 1;
  alignas(64) std::atomic<int64_t> next_{0};
  // Generation of the job, whether it is open, and the workers inside (see the .cpp).
  alignas(64) std::atomic<uint32_t> state_{0};
  std::atomic<bool> stop_{false};

  std::vector<std::thread> workers_;
};

}  // namespace trtree
