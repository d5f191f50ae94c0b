// What ranks of a job share, seen from Python: runtime/distributed drives it.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "runtime/cpp/distributed/leader_engine.hpp"
#include "runtime/cpp/distributed/mpi.hpp"
#include "runtime/cpp/distributed/watchdog.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace trtree {

namespace {

using namespace distributed;

// A Watchdog as a context manager.
struct WatchdogContext {
  double seconds;
  std::string message;
  std::unique_ptr<Watchdog> running = nullptr;
};

void bind_watchdog(nb::module_& m) {
  nb::class_<WatchdogContext>(m, "Watchdog",
                              "with Watchdog(seconds, message): where the block takes longer, "
                              "print the message to stderr and exit with status 1, even while "
                              "Python's lock is held.")
      .def(
          "__init__",
          [](WatchdogContext* self, double seconds, std::string message) {
            new (self) WatchdogContext{seconds, std::move(message)};
          },
          "seconds"_a, "message"_a)
      .def("__enter__",
           [](WatchdogContext& self) {
             self.running = std::make_unique<Watchdog>(self.seconds, self.message);
           })
      .def(
          "__exit__",
          [](WatchdogContext& self, nb::object, nb::object, nb::object) { self.running.reset(); },
          "kind"_a.none(), "error"_a.none(), "trace"_a.none());
}

using Words = nb::ndarray<nb::numpy, const int32_t, nb::ndim<1>, nb::c_contig>;

LeaderEngine::Send send_in_python(nb::object callback) {
  return [callback](std::span<const int32_t> message) {
    const nb::gil_scoped_acquire gil;
    callback(Words(message.data(), {message.size()}, nb::none()));
  };
}

void bind_mpi(nb::module_& m) {
  nb::class_<MpiLibrary>(m, "MpiLibrary",
                         "Functions (addresses) and handles (integers) of a loaded MPI.")
      .def(
          "__init__",
          [](MpiLibrary* self, uintptr_t all_gather, uintptr_t test, uintptr_t send,
             uintptr_t communicator, uintptr_t int32_type, uintptr_t float_type, int32_t rank,
             int32_t size) {
            new (self) MpiLibrary{all_gather, test,       send, communicator,
                                  int32_type, float_type, rank, size};
          },
          nb::kw_only(), "all_gather"_a, "test"_a, "send"_a, "communicator"_a, "int32_type"_a,
          "float_type"_a, "rank"_a, "size"_a);
  nb::class_<MpiCollectives, cpu::Collectives>(m, "MpiCollectives",
                                               "The collectives of an MPI communicator.")
      .def(nb::init<const MpiLibrary&>(), "mpi"_a)
      .def(
          "all_gather",
          [](MpiCollectives& self, nb::ndarray<const float, nb::ndim<1>, nb::c_contig> mine,
             nb::ndarray<float, nb::ndim<1>, nb::c_contig> all) {
            if (all.size() != mine.size() * self.size()) {
              throw std::invalid_argument("all_gather of " + std::to_string(mine.size()) +
                                          " into " + std::to_string(all.size()) + " floats");
            }
            const nb::gil_scoped_release released;
            self.all_gather({mine.data(), mine.size()}, {all.data(), all.size()});
          },
          "mine"_a, "all"_a, "float32 [n] of every rank to float32 [size * n].");
}

}  // namespace

void bind_distributed(nb::module_& m) {
  nb::module_ sub = m.def_submodule("distributed", "Tensor-parallel engines over several ranks.");
  bind_mpi(sub);
  bind_watchdog(sub);
  nb::class_<LeaderEngine, Engine>(
      sub, "LeaderEngine",
      "A replica's engine as its executor sees it; see runtime/cpp/distributed/leader_engine.hpp.")
      .def(
          "__init__",
          [](LeaderEngine* self, Engine& part, nb::object send) {
            new (self) LeaderEngine(part, send_in_python(std::move(send)));
          },
          "part"_a, "send"_a, nb::keep_alive<1, 2>(),
          "send(message): hand an int32 array to every worker.")
      .def_static(
          "over_mpi",
          [](Engine& part, const MpiLibrary& mpi, int32_t tag) {
            return new LeaderEngine(part, [mpi, tag](std::span<const int32_t> message) {
              send_to_all(mpi, tag, message);
            });
          },
          "part"_a, "mpi"_a, "tag"_a, nb::keep_alive<0, 1>(),
          "Messages go to every other rank of a communicator.")
      .def_prop_ro("failed", &LeaderEngine::failed,
                   "A call threw; workers may wait for a part that will not come.");
  sub.def(
      "make_call",
      [](Engine& engine, Words message) {
        const nb::gil_scoped_release released;
        make_call(engine, {message.data(), message.size()});
      },
      "engine"_a, "message"_a, "Make the call on a worker's part of the engine.");
}

}  // namespace trtree
