// Refusals by name: what an engine cannot do, and what an engine got wrong.
#pragma once

#include "runtime/cpp/executor.hpp"

namespace trtree {

// Throw std::invalid_argument for capabilities no executor can work with.
void check_capabilities(const Capabilities& capabilities);

// Throw std::invalid_argument, naming the parameter and both values, for a request
// that this engine cannot serve.
void check_request(const Request& request, const Capabilities& capabilities,
                   const ExecutorConfig& config);

// Throw std::runtime_error for results that are not what was asked for.
void check_draft(const DraftResult& draft, size_t requests, int32_t top_k);
void check_step(const StepResult& result, const RowBatch& batch, int32_t vocab_size);

}  // namespace trtree
