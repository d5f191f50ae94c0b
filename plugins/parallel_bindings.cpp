// Threads and instruction sets, seen from Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "plugins/cpu_isa.hpp"
#include "plugins/parallel.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

void bind_parallel(nb::module_& m) {
  nb::class_<Parallel>(m, "Parallel", "Spreads the work of a kernel over threads.")
      .def_prop_ro("num_threads", &Parallel::num_threads);
  nb::class_<Serial, Parallel>(m, "Serial", "The calling thread alone.").def(nb::init<>());
  m.def(
      "cpu_isa", [](const std::string& name) { return std::string(isa_name(isa_from_name(name))); },
      "name"_a = "",
      "The instruction set the kernels run on: \"portable\", \"avx2\" or \"avx512\"; by default "
      "the best. Raises ValueError if this build or CPU lacks the one asked for.");
}

}  // namespace trtree
