// How a kernel spreads independent work over threads, without owning any.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace trtree {

// A reference to a callable (begin, end); the callable must outlive it.
class RangeFn {
 public:
  template <typename F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, RangeFn>)
  RangeFn(F&& f)  // NOLINT: implicit, so that a lambda can be passed
      : object_(const_cast<void*>(static_cast<const void*>(std::addressof(f)))),
        call_([](void* object, int64_t begin, int64_t end) {
          (*static_cast<std::remove_reference_t<F>*>(object))(begin, end);
        }) {}

  void operator()(int64_t begin, int64_t end) const { call_(object_, begin, end); }

 private:
  void* object_;
  void (*call_)(void*, int64_t, int64_t);
};

class Parallel {
 public:
  virtual ~Parallel() = default;
  virtual int num_threads() const = 0;
  // Calls fn on disjoint ranges that cover [0, n), from several threads at once, and
  // returns when all are done. Ranges hold at least `grain` items (but for the last).
  // Which thread takes which range is not fixed: results must not depend on it.
  // fn must not throw, and must not call parallel_for of the same object.
  virtual void parallel_for(int64_t n, int64_t grain, RangeFn fn) = 0;
};

// Everything on the calling thread.
class Serial final : public Parallel {
 public:
  int num_threads() const override { return 1; }
  void parallel_for(int64_t n, int64_t, RangeFn fn) override {
    if (n > 0) fn(0, n);
  }
};

}  // namespace trtree
