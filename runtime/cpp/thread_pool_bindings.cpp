#include <nanobind/nanobind.h>

#include "runtime/cpp/thread_pool.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

void bind_thread_pool(nb::module_& m) {
  nb::class_<ThreadPool, Parallel>(m, "ThreadPool",
                                   "The CPU engine's threads; num_threads counts the caller.")
      .def(nb::init<int>(), "num_threads"_a);
}

}  // namespace trtree
