#include "runtime/cpp/thread_pool.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace trtree {
namespace {

// About 50 us of pauses: longer than the gap between two linears of a step, short
// enough not to be seen on an idle machine.
constexpr int kSpins = 2000;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// ThreadPool::state_: generation << 9 | open << 8 | workers inside.
constexpr uint32_t kInside = 0xff;
constexpr uint32_t kOpen = 0x100;
constexpr uint32_t kGeneration = 0x200;

// Waits until done(value): spins, then sleeps.
template <typename Done>
uint32_t wait_until(const std::atomic<uint32_t>& value, Done done) {
  uint32_t now = value.load(std::memory_order_acquire);
  for (int i = 0; i < kSpins && !done(now); ++i) {
    relax();
    now = value.load(std::memory_order_acquire);
  }
  while (!done(now)) {
    value.wait(now, std::memory_order_acquire);
    now = value.load(std::memory_order_acquire);
  }
  return now;
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  if (num_threads < 1 || num_threads > 256) {
    throw std::invalid_argument("a thread pool has 1 to 256 threads, not " +
                                std::to_string(num_threads));
  }
  workers_.reserve(num_threads - 1);
  for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  state_.fetch_add(kGeneration, std::memory_order_release);
  state_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::parallel_for(int64_t n, int64_t grain, RangeFn fn) {
  grain = std::max<int64_t>(grain, 1);
  if (workers_.empty() || n <= grain) {
    if (n > 0) fn(0, n);
    return;
  }
  const std::lock_guard lock(turn_);
  fn_ = &fn;
  n_ = n;
  grain_ = grain;
  next_.store(0, std::memory_order_relaxed);
  state_.fetch_add(kGeneration | kOpen, std::memory_order_release);
  state_.notify_all();
  take_ranges(fn);
  state_.fetch_and(~kOpen, std::memory_order_relaxed);
  wait_until(state_, [](uint32_t state) { return (state & kInside) == 0; });
}

void ThreadPool::work() {
  const auto generation = [](uint32_t state) { return state & ~(kOpen | kInside); };
  uint32_t seen = 0;
  for (;;) {
    uint32_t state = wait_until(state_, [&](uint32_t now) { return generation(now) != seen; });
    seen = generation(state);
    if (stop_.load(std::memory_order_relaxed)) return;
    bool inside = false;
    while (!inside && (state & kOpen) && generation(state) == seen) {
      inside = state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire);
    }
    if (!inside) continue;
    take_ranges(*fn_);
    state = state_.fetch_sub(1, std::memory_order_release) - 1;
    if ((state & (kOpen | kInside)) == 0) state_.notify_all();
  }
}

// Guided: ranges shrink towards the end, so that a thread that was held up leaves
// the others little to wait for.
void ThreadPool::take_ranges(RangeFn fn) {
  const int64_t shares = 2 * num_threads();
  int64_t begin = next_.load(std::memory_order_relaxed);
  while (begin < n_) {
    const int64_t size = std::max((n_ - begin) / shares, grain_);
    const int64_t end = std::min(begin + size, n_);
    if (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
    fn(begin, end);
    begin = next_.load(std::memory_order_relaxed);
  }
}

}  // namespace trtree
