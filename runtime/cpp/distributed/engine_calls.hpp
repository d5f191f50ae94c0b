// Calls of an Engine as bytes: the leader of a tensor-parallel engine has its workers make
// the calls that it makes. Ranks are one program on one kind of machine, so the words are
// the machine's own.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "runtime/cpp/engine.hpp"

namespace trtree::distributed {

using Message = std::vector<int32_t>;

Message encode_step(const RowBatch& batch);
Message encode_commit(const std::vector<Commit>& commits);
Message encode_draft(const std::vector<DraftRequest>& requests, int32_t top_k);
Message encode_load_state(int32_t snapshot, int32_t slot);

// Makes the call on a worker's engine and drops its result; logits are left out of it.
// Throws std::invalid_argument for a message that is cut short or of another version.
void make_call(Engine& engine, std::span<const int32_t> message);

}  // namespace trtree::distributed
