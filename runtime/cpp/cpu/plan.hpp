// What build/lowering/cpu.py decided: the networks as flat lists of ops over buffers and
// memory-mapped weights. Plain data, filled by the bindings from plan.json.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "plugins/linear_job.hpp"
#include "plugins/moe/moe.hpp"

namespace trtree::cpu {

enum class OpKind {
  kAdd,
  kAllGather,
  kArgmax,
  kCausalConv,
  kConcat,
  kEmbedding,
  kExpertsDown,
  kExpertsLinear,
  kExpertsScale,
  kExpertsUp,
  kGatedDeltaNet,
  kGatherRows,
  kHeadKeys,
  kHeadValues,
  kIndexSelect,
  kKvAppend,
  kLatentAppend,
  kLatentAttention,
  kLayerNorm,
  kLinear,
  kRmsNorm,
  kRotaryEmbedding,
  kRoute,
  kScale,
  kSigmoidMul,
  kSiluMul,
  kSplitHeads,
  kTopKLogProbs,
  kTreeAttention,
};

// A float32 matrix [rows or outputs, width] inside a buffer; splits and reshapes of a
// tensor are views of it. What index_select gives are the bits of int32.
struct PlanTensor {
  int32_t buffer = 0;
  int64_t offset = 0;  // of the first column, in floats
  int64_t width = 0;
  int64_t stride = 0;  // floats between rows
};

struct PlanBuffer {
  int64_t width = 0;        // floats per row, the widest of the tensors that share it
  bool per_output = false;  // one row per output row instead of one per row
};

struct PlanOp {
  OpKind kind = OpKind::kAdd;
  std::string name;
  std::vector<int32_t> inputs;   // tensors
  std::vector<int32_t> outputs;  // tensors
  int32_t weight = -1;
  int32_t state = -1;
  int32_t rope = -1;
  int32_t routing = -1;
  int32_t heads = 1;         // vectors per row; experts: slots; gated_delta_net: of keys
  float scale = 1;           // tree_attention, latent_attention
  double eps = 0;            // rms_norm, layer_norm
  int32_t window = 0;        // tree_attention; 0: none
  bool causal_mask = false;  // tree_attention: of a drafter's block
  // linear: this rank's part of K, whose segment sums all ranks add.
  bool row_parallel = false;
  std::vector<int64_t> rank_columns;  // all_gather: bounds of every rank's columns
};

struct PlanNetwork {
  std::vector<PlanBuffer> buffers;
  std::vector<PlanTensor> tensors;
  std::vector<PlanOp> ops;
  int32_t captured_input = -1;  // tensors by role, -1: none
  int32_t captured_output = -1;
  int32_t logits = -1;
};

enum class WeightKind { kNvfp4, kDense, kVector };

// A matrix, a vector, or the equal matrices of a layer's experts one after another.
struct PlanWeight {
  std::string name;
  WeightKind kind = WeightKind::kDense;
  std::string file;    // in the engine directory
  int64_t offset = 0;  // of the packed weight in the file, a multiple of 64
  int64_t bytes = 0;
  int64_t bias_offset = -1;
  int64_t out_features = 0;
  int64_t in_features = 0;
  std::string dtype;                 // dense: of the stored elements
  float global_scale = 0;            // NVFP4
  float input_scale = 0;             // NVFP4 with quantized activations; 0: bf16 activations
  int64_t experts = 0;               // stacked; 0: none are
  std::vector<float> expert_scales;  // NVFP4 experts: each one's global scale
  std::vector<int64_t> segments;     // bounds of the K segments, in blocks of 16
  // Two matrices per head, packed one after another: of a head's first rows, transposed, and of
  // its others. How many rows each has; empty: it is one matrix.
  std::vector<int64_t> head_sizes;
};

enum class StateKind { kKv, kLatent, kConv, kRecurrent };

// Keys and values [heads, head_dim] per token, or one vector [head_dim]; or per request a window
// [heads, head_dim] or a recurrence's [heads, head_dim, value_dim].
struct PlanState {
  StateKind kind = StateKind::kKv;
  std::string dtype = "float32";  // or of KV float8_e4m3fn
  float k_scale = 1;              // of such KV: a key is code * k_scale
  float v_scale = 1;
  int64_t heads = 0;
  int64_t head_dim = 0;
  int64_t value_dim = 0;
  bool drafter = false;

  // In pages, a token per row; others have one size per request.
  bool paged() const { return kind == StateKind::kKv || kind == StateKind::kLatent; }
  bool fp8() const { return dtype == "float8_e4m3fn"; }
};

struct PlanRope {
  std::vector<double> inv_freq;
  double scaling = 1;
  bool interleaved = false;
};

struct Plan {
  std::string directory;
  int32_t rank = 0;   // whose part of the engine this is
  int32_t ranks = 1;  // of the whole
  std::map<std::string, PlanNetwork> networks;
  std::vector<PlanWeight> weights;
  std::vector<PlanState> states;
  std::vector<PlanRope> ropes;
  std::vector<moe::Routing> routings;
};

}  // namespace trtree::cpu
