#include "runtime/cpp/distributed/mpi.hpp"

#include <chrono>
#include <cstddef>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>

namespace trtree::distributed {

namespace {

using AllGather = int(const void*, int, uintptr_t, void*, int, uintptr_t, uintptr_t, void*);
using Test = int(void*, int*, void*);
using Send = int(const void*, int, uintptr_t, int, int, uintptr_t);
constexpr int kSuccess = 0;  // MPI_SUCCESS

void check(int code, const char* function) {
  if (code == kSuccess) return;
  throw std::runtime_error(std::string(function) + " failed with code " + std::to_string(code));
}

int count_of(size_t size) {
  if (size > static_cast<size_t>(std::numeric_limits<int>::max())) {
    throw std::runtime_error("a message of " + std::to_string(size) + " elements to other ranks");
  }
  return static_cast<int>(size);
}

// Between looks at whether the others have come. MPI's own waiting would burn the processor
// that they may be waiting for, where ranks have to share processors.
void pause(int looks) {
  constexpr int kSpins = 50, kYields = 200;
  if (looks < kSpins) return;
  if (looks < kYields) return std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::microseconds(10));
}

}  // namespace

void MpiCollectives::all_gather(std::span<const float> mine, std::span<float> all) {
  auto* const gather = reinterpret_cast<AllGather*>(mpi_.all_gather);
  const int count = count_of(mine.size());
  uintptr_t request = 0;                       // an int or a pointer
  alignas(std::max_align_t) char status[256];  // no MPI's is larger
  check(gather(mine.data(), count, mpi_.float_type, all.data(), count, mpi_.float_type,
               mpi_.communicator, &request),
        "MPI_Iallgather");
  auto* const test = reinterpret_cast<Test*>(mpi_.test);
  int done = 0;
  for (int looks = 0; done == 0; ++looks) {
    check(test(&request, &done, status), "MPI_Test");
    if (done == 0) pause(looks);
  }
}

void send_to_all(const MpiLibrary& mpi, int32_t tag, std::span<const int32_t> message) {
  auto* const send = reinterpret_cast<Send*>(mpi.send);
  for (int32_t rank = 0; rank < mpi.size; ++rank) {
    if (rank == mpi.rank) continue;
    check(
        send(message.data(), count_of(message.size()), mpi.int32_type, rank, tag, mpi.communicator),
        "MPI_Send");
  }
}

}  // namespace trtree::distributed
