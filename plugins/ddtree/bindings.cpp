#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace trtree {
void bind_ddtree(nb::module_&) {}
}  // namespace trtree
