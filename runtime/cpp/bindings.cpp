// The extension module trtree._core. Each part binds itself beside its sources.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace trtree {
void bind_cpu_engine(nb::module_& m);
void bind_ddtree(nb::module_& m);
void bind_distributed(nb::module_& m);
void bind_dense_linear(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_executor(nb::module_& m);
void bind_linear_bench(nb::module_& m);
void bind_moe(nb::module_& m);
void bind_nvfp4_linear(nb::module_& m);
void bind_parallel(nb::module_& m);
void bind_requests(nb::module_& m);
void bind_sampler(nb::module_& m);
void bind_thread_pool(nb::module_& m);
void bind_tree_attention(nb::module_& m);
void bind_tree_policy(nb::module_& m);
}  // namespace trtree

NB_MODULE(_core, m) {
  // Objects held by module globals outlive the interpreter's shutdown; that is no leak.
  nb::set_leak_warnings(false);
  m.attr("__version__") = TRTREE_VERSION;
  trtree::bind_ddtree(m);
  trtree::bind_engine(m);
  trtree::bind_requests(m);
  trtree::bind_sampler(m);
  trtree::bind_tree_policy(m);
  trtree::bind_executor(m);
  trtree::bind_parallel(m);
  trtree::bind_thread_pool(m);
  trtree::bind_dense_linear(m);
  trtree::bind_moe(m);
  trtree::bind_nvfp4_linear(m);
  trtree::bind_tree_attention(m);
  trtree::bind_linear_bench(m);
  trtree::bind_cpu_engine(m);
  trtree::bind_distributed(m);
}
