// MPI without a compile-time MPI: the functions of the library that mpi4py has loaded,
// called through their addresses, so that steps need neither Python nor its lock.
#pragma once

#include <cstdint>
#include <span>

#include "runtime/cpp/cpu/collectives.hpp"

namespace trtree::distributed {

// Addresses of functions, and handles as integers. An MPI's handles are ints or pointers;
// either way a 64-bit argument carries them under the calling conventions of x86-64 and
// AArch64, where a callee reads the low half of the register or stack slot for an int.
struct MpiLibrary {
  uintptr_t all_gather = 0;  // MPI_Iallgather
  uintptr_t test = 0;        // MPI_Test
  uintptr_t send = 0;        // MPI_Send
  uintptr_t communicator = 0;
  uintptr_t int32_type = 0;
  uintptr_t float_type = 0;
  int32_t rank = 0;
  int32_t size = 0;
};

class MpiCollectives final : public cpu::Collectives {
 public:
  explicit MpiCollectives(const MpiLibrary& mpi) : mpi_(mpi) {}

  int32_t rank() const override { return mpi_.rank; }
  int32_t size() const override { return mpi_.size; }
  // Throws std::runtime_error with MPI's code.
  void all_gather(std::span<const float> mine, std::span<float> all) override;

 private:
  const MpiLibrary mpi_;
};

// To every other rank of the communicator. Throws std::runtime_error with MPI's code.
void send_to_all(const MpiLibrary& mpi, int32_t tag, std::span<const int32_t> message);

}  // namespace trtree::distributed
