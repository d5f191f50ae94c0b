// The engine for machines without a GPU: a plan over packed, memory-mapped weights.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/cpp/cpu/network_runner.hpp"
#include "runtime/cpp/engine.hpp"
#include "runtime/cpp/thread_pool.hpp"

namespace trtree::cpu {

class CpuEngine final : public Engine {
 public:
  // `capabilities` say the pool's pages and the limits; mask_token_id fills a block's
  // slots behind the bonus token. Throws std::runtime_error or std::invalid_argument.
  CpuEngine(Plan plan, Capabilities capabilities, int32_t mask_token_id, int num_threads, Isa isa);

  Capabilities capabilities() const override { return capabilities_; }
  StepResult step(const RowBatch& batch) override;
  void commit(const std::vector<Commit>& commits) override;
  DraftResult draft(const std::vector<DraftRequest>& requests, int32_t top_k) override;

 private:
  void extend_drafter(const std::vector<Commit>& commits);
  const Segment& segment_of(int64_t request_id) const;
  void check_path(const Commit& commit) const;
  NetworkRunner& runner(const char* name) { return *runners_.at(name); }

  const Plan plan_;
  const Capabilities capabilities_;
  const int32_t mask_token_id_;
  ThreadPool threads_;
  const WeightTable weights_;
  // KV of all states, k then v of each. calloc: untouched pages take no memory.
  std::unique_ptr<float, decltype(&std::free)> pool_{nullptr, &std::free};
  std::vector<attention::PagedKv> caches_;
  std::unordered_map<std::string, std::unique_ptr<NetworkRunner>> runners_;

  // The last step, for the commit that follows it.
  std::vector<Segment> segments_;
  std::vector<int32_t> parents_;
  std::vector<int32_t> positions_;
};

}  // namespace trtree::cpu
