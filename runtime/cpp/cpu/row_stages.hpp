// Which ops of a network run together, row by row.
//
// What works on one row at a time needs no barrier between ops: a thread takes some rows
// through all of them, while they are in its cache, and prepares them for the linear behind.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/cpp/cpu/plan.hpp"

namespace trtree::cpu {

struct Stage {
  int32_t first = 0;  // of the network's ops
  int32_t count = 0;
  bool by_rows = false;  // otherwise it is one op
  bool per_output = false;
  bool prepares = false;  // rows of the input of the NVFP4 linear that follows
  int64_t width = 0;      // floats written per row

  int32_t end() const { return first + count; }
};

// Whether an op's results in a row depend on nothing but that row.
bool is_row_local(OpKind kind);

// All ops in order.
std::vector<Stage> make_stages(const PlanNetwork& network, const std::vector<PlanWeight>& weights);

}  // namespace trtree::cpu
