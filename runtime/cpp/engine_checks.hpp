// What every engine refuses before it touches memory: calls that its capabilities or the
// last step do not cover. Each throws std::invalid_argument that names the request or the
// limit and both values.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/cpp/engine.hpp"

namespace trtree {

// Rows, requests, slots, pages, positions and token ids of a step.
void check_batch(const RowBatch& batch, const Capabilities& capabilities);

// Requests of one drafter pass.
void check_draft_requests(const std::vector<DraftRequest>& requests, int32_t top_k,
                          const Capabilities& capabilities);

// The rows of each commit are a path of its request's segment in `batch`, the sequence is
// the one of that step, and no request is committed twice.
void check_commits(const std::vector<Commit>& commits, const RowBatch& batch);

// The states that commits save: rows that are committed, and each snapshot once.
void check_saves(const std::vector<Commit>& commits, const Capabilities& capabilities);
void check_load(int32_t snapshot, int32_t slot, const Capabilities& capabilities);

}  // namespace trtree
