// Ends the process where Python cannot: MPI_Init waits for all ranks, and holds Python's lock.
#pragma once

#include <string>
#include <thread>

namespace trtree::distributed {

class Watchdog {
 public:
  // After `seconds`, unless destroyed before: `message` to stderr, and exit with status 1.
  Watchdog(double seconds, std::string message);

 private:
  std::jthread thread_;
};

}  // namespace trtree::distributed
