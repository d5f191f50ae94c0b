// The engine of a tensor-parallel replica as its executor sees it: every call is sent to
// the worker ranks, then made on this rank's own part. Workers answer nothing; what they
// have to say passes through the collectives of the parts.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "runtime/cpp/distributed/engine_calls.hpp"
#include "runtime/cpp/engine.hpp"

namespace trtree::distributed {

class LeaderEngine final : public Engine {
 public:
  using Send = std::function<void(std::span<const int32_t> message)>;

  // `part` must outlive this; `send` hands a message to every worker.
  LeaderEngine(Engine& part, Send send) : part_(part), send_(std::move(send)) {}

  Capabilities capabilities() const override { return part_.capabilities(); }
  StepResult step(const RowBatch& batch) override {
    return call(encode_step(batch), [&] { return part_.step(batch); });
  }
  void commit(const std::vector<Commit>& commits) override {
    call(encode_commit(commits), [&] { part_.commit(commits); });
  }
  DraftResult draft(const std::vector<DraftRequest>& requests, int32_t top_k) override {
    return call(encode_draft(requests, top_k), [&] { return part_.draft(requests, top_k); });
  }
  void load_state(int32_t snapshot, int32_t slot) override {
    call(encode_load_state(snapshot, slot), [&] { part_.load_state(snapshot, slot); });
  }

  // A call threw here; workers may wait for a part that will not come.
  bool failed() const { return failed_; }

 private:
  template <typename Part>
  std::invoke_result_t<Part> call(const Message& message, Part part) {
    try {
      send_(message);
      return part();
    } catch (...) {
      failed_ = true;
      throw;
    }
  }

  Engine& part_;
  const Send send_;
  std::atomic<bool> failed_ = false;
};

}  // namespace trtree::distributed
