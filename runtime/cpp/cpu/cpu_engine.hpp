// The engine for machines without a GPU: a plan over packed, memory-mapped weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/cpp/cpu/network_runner.hpp"
#include "runtime/cpp/engine.hpp"
#include "runtime/cpp/thread_pool.hpp"

namespace trtree::cpu {

class CpuEngine final : public Engine {
 public:
  // `capabilities` say the pool's pages and the limits; mask_token_id fills a block's
  // slots behind the bonus token. Throws std::runtime_error or std::invalid_argument.
  // collectives: needed by a plan for several ranks, and outlives the engine.
  CpuEngine(Plan plan, Capabilities capabilities, int32_t mask_token_id, int num_threads, Isa isa,
            Collectives* collectives = nullptr);

  Capabilities capabilities() const override { return capabilities_; }
  StepResult step(const RowBatch& batch) override;
  void commit(const std::vector<Commit>& commits) override;
  DraftResult draft(const std::vector<DraftRequest>& requests, int32_t top_k) override;
  void load_state(int32_t snapshot, int32_t slot) override;

  // Look at every op's operands and results, as tests and tools do; {} ends it.
  using Observer =
      std::function<void(const std::string& network, const PlanOp& op,
                         const std::vector<Matrix>& inputs, const std::vector<Matrix>& outputs)>;
  void observe(Observer observer) { observer_ = std::move(observer); }

 private:
  void run(const std::string& network, const StepRows& rows, int32_t top_k);
  void extend_drafter(const std::vector<Commit>& commits);
  const Segment& segment_of(int64_t request_id) const;
  NetworkRunner& runner(const std::string& name) { return *runners_.at(name); }

  const Plan plan_;
  const Capabilities capabilities_;
  const int32_t mask_token_id_;
  ThreadPool threads_;
  const WeightTable weights_;
  // KV and latents of all states, of KV k then v. calloc: untouched pages take no memory.
  std::unique_ptr<std::byte, decltype(&std::free)> pool_{nullptr, &std::free};
  PagedCaches caches_;
  BranchStates branches_;
  std::unordered_map<std::string, std::unique_ptr<NetworkRunner>> runners_;

  Observer observer_;

  // The last step, for the commit that follows it; none once it is committed.
  std::optional<RowBatch> last_step_;
};

}  // namespace trtree::cpu
