// A plan is data from a file: everything it points to is checked before it is used.
#pragma once

#include "runtime/cpp/cpu/collectives.hpp"
#include "runtime/cpp/cpu/plan.hpp"

namespace trtree::cpu {

// Throws std::invalid_argument, naming the network and op or the weight, for an index out
// of range, a tensor outside its buffer, or sizes that do not fit one another.
void check_plan(const Plan& plan);

// Throws std::invalid_argument unless the plan is for this rank of that many; null
// collectives are one rank.
void check_ranks(const Plan& plan, const Collectives* collectives);

}  // namespace trtree::cpu
