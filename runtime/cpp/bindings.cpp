// The extension module trtree._core. Each part binds itself beside its sources.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace trtree {
void bind_ddtree(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_executor(nb::module_& m);
}  // namespace trtree

NB_MODULE(_core, m) {
  // Objects held by module globals outlive the interpreter's shutdown; that is no leak.
  nb::set_leak_warnings(false);
  m.attr("__version__") = TRTREE_VERSION;
  trtree::bind_ddtree(m);
  trtree::bind_engine(m);
  trtree::bind_executor(m);
}
