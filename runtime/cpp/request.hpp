// What users ask of the executor and what it answers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trtree {

enum class DecodingMode { kPlain, kChain, kTree };
enum class TreeKind { kDynamic, kStatic };
enum class FinishReason { kNotFinished, kStopToken, kLength, kCancelled };

struct SamplingConfig {
  float temperature = 0.0f;  // 0: greedy, the only value of this version
};

struct SpeculativeConfig {
  DecodingMode mode = DecodingMode::kTree;
  TreeKind tree = TreeKind::kDynamic;
  int32_t tree_budget = 16;  // nodes besides the root
  int32_t top_k = 0;         // ranks per depth; 0: as many as the budget can use
};

struct Request {
  std::vector<int32_t> prompt_token_ids;
  int32_t max_tokens = 128;
  std::vector<int32_t> stop_token_ids;  // ends the output, and is part of it
  SamplingConfig sampling;
  SpeculativeConfig speculative;
};

struct RequestStatistics {
  int32_t prefill_forwards = 0;  // target passes over prompt rows
  int32_t verify_forwards = 0;   // target passes that decode: one per round
  int32_t drafted_tokens = 0;    // tree nodes besides roots
  int32_t accepted_tokens = 0;   // of those, nodes on accepted paths
  int32_t decoded_tokens = 0;    // tokens emitted by verify passes

  int32_t target_forwards() const { return prefill_forwards + verify_forwards; }
  // Tokens per verify pass, the root's own choice included; 0 before the first.
  double acceptance_length() const {
    return verify_forwards == 0 ? 0.0 : static_cast<double>(decoded_tokens) / verify_forwards;
  }
};

struct Response {
  int64_t request_id = 0;
  std::vector<int32_t> token_ids;  // new since the last response
  FinishReason finish_reason = FinishReason::kNotFinished;
  RequestStatistics statistics;  // so far

  bool finished() const { return finish_reason != FinishReason::kNotFinished; }
};

}  // namespace trtree
