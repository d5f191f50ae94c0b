// Threads that outlive a call: starting one costs more than scanning several rows.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace trtree::ddtree {

class WorkerPool {
 public:
  // Shared by the process and never destroyed: joining threads while it exits would
  // hang a forked child, which has none of them.
  static WorkerPool& shared();

  // Runs `work(i)` on the calling thread (i = 0) and on up to `num_threads - 1` helpers,
  // each with its own i, and returns when all that have begun are done. `work` must take
  // its share from a common counter, and not throw: helpers that are late, or busy for
  // another caller, are not waited for.
  void run(int32_t num_threads, const std::function<void(int32_t)>& work);

 private:
  void serve();

  std::mutex one_job_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::vector<std::thread> helpers_;
  const std::function<void(int32_t)>* work_ = nullptr;
  int32_t next_index_ = 0;  // helpers may begin with indices [next_index_, end_index_)
  int32_t end_index_ = 0;
  int32_t num_running_ = 0;
};

}  // namespace trtree::ddtree
