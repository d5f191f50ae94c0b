// The indexer's choice on the CPU; README.md says what is chosen.
//
// A key's score is a function of it and of the row's queries alone, so a tree row chooses what
// plain decoding does.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "plugins/cpu_isa.hpp"
#include "plugins/latent_cache.hpp"
#include "plugins/parallel.hpp"
#include "plugins/tree_attention/cpu.hpp"

namespace trtree::indexer {

struct Index {
  latent::Cache keys;
  std::span<const attention::Segment> segments;
  const attention::Visibility* visibility = nullptr;
  attention::Heads q;        // [rows, heads, keys.dim]
  attention::Heads weights;  // [rows, heads]
  int64_t heads = 0;
  int64_t top_k = 0;
};

// Fills selection [rows, top_k]: slots in rising order, then -1. `op` names the call in errors.
// Throws std::invalid_argument unless keys are whole multiples of 16 numbers, and
// std::runtime_error where a row that has to choose has a score that is NaN.
void select(const Index& index, const std::string& op, std::span<int32_t> selection,
            Parallel& parallel, Isa isa);

}  // namespace trtree::indexer
