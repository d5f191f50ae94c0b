#include "runtime/cpp/cpu_floors.hpp"

#include <atomic>
#include <chrono>

#include "plugins/cpu_isa.hpp"

namespace trtree::bench {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

uint64_t read_words(const uint8_t* begin, const uint8_t* end) {
  constexpr int kWords = 8;
  uint64_t sums[kWords] = {};
  for (; begin + sizeof(sums) <= end; begin += sizeof(sums)) {
    const auto* words = reinterpret_cast<const uint64_t*>(begin);
    for (int i = 0; i < kWords; ++i) sums[i] |= words[i];
  }
  uint64_t all = 0;
  for (uint64_t sum : sums) all |= sum;
  return all;
}

}  // namespace

double time_read(std::span<const uint8_t> bytes, Parallel& parallel) {
  constexpr int64_t kChunk = 1 << 20;
  const int64_t size = static_cast<int64_t>(bytes.size());
#ifdef TRTREE_X86_KERNELS
  const auto read = best_isa() == Isa::kAvx512 ? read_avx512 : read_words;
#else
  const auto read = read_words;
#endif
  std::atomic<uint64_t> sink{0};
  const auto start = Clock::now();
  parallel.parallel_for(size / kChunk, 1, [&](int64_t begin, int64_t end) {
    sink |= read(bytes.data() + begin * kChunk, bytes.data() + end * kChunk);
  });
  return since(start) * static_cast<double>(size) / static_cast<double>(size / kChunk * kChunk);
}

double time_blocks(BlockKind kind, int64_t blocks, Parallel& parallel) {
#ifdef TRTREE_X86_KERNELS
  if (best_isa() == Isa::kAvx512) {
    constexpr int64_t kChunk = 8192;
    const auto start = Clock::now();
    parallel.parallel_for(blocks / kChunk, 1, [&](int64_t begin, int64_t end) {
      run_blocks_avx512(kind, (end - begin) * kChunk);
    });
    return since(start) * static_cast<double>(blocks) /
           static_cast<double>(blocks / kChunk * kChunk);
  }
#endif
  (void)kind, (void)blocks, (void)parallel;
  return -1;
}

}  // namespace trtree::bench
