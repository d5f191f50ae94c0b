#include "plugins/ddtree/worker_pool.hpp"

namespace trtree::ddtree {

WorkerPool& WorkerPool::shared() {
  static WorkerPool* const pool = new WorkerPool;
  return *pool;
}

void WorkerPool::run(int32_t num_threads, const std::function<void(int32_t)>& work) {
  const std::unique_lock only(one_job_, std::try_to_lock);
  if (num_threads <= 1 || !only.owns_lock()) {
    work(0);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    while (static_cast<int32_t>(helpers_.size()) < num_threads - 1) {
      helpers_.emplace_back([this] { serve(); });
    }
    work_ = &work;
    next_index_ = 1;
    end_index_ = num_threads;
  }
  wake_.notify_all();
  work(0);
  std::unique_lock lock(mutex_);
  end_index_ = next_index_;
  idle_.wait(lock, [this] { return num_running_ == 0; });
}

void WorkerPool::serve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return next_index_ < end_index_; });
    const int32_t index = next_index_++;
    const auto& work = *work_;
    ++num_running_;
    lock.unlock();
    work(index);
    lock.lock();
    if (--num_running_ == 0) idle_.notify_one();
  }
}

}  // namespace trtree::ddtree
