#include "runtime/cpp/distributed/watchdog.hpp"

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <stop_token>
#include <utility>

namespace trtree::distributed {

Watchdog::Watchdog(double seconds, std::string message)
    : thread_([seconds, text = std::move(message)](const std::stop_token& stop) {
        std::mutex mutex;
        std::condition_variable_any wake;
        std::unique_lock lock(mutex);
        wake.wait_for(lock, stop, std::chrono::duration<double>(seconds), [] { return false; });
        if (stop.stop_requested()) return;
        std::fprintf(stderr, "%s\n", text.c_str());
        std::_Exit(1);
      }) {}

}  // namespace trtree::distributed
