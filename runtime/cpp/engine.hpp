// The contract between the executor and whatever runs the network. The executor
// knows nothing of layers; an engine knows nothing of text.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/cpp/row_batch.hpp"

namespace trtree {

enum class KvLayout { kPaged, kContiguous };
enum class TreeState { kExact, kInexact };

struct Capabilities {
  std::string backend;      // "reference", "cpu", "tensorrt"
  std::string activations;  // input of quantized linears: "nvfp4", "bf16", "float32"
  std::string sm;           // "" off the GPU
  KvLayout kv_layout = KvLayout::kPaged;
  int32_t page_size = 0;       // tokens per KV page (paged)
  int32_t num_pages = 0;       // pages in the pool (paged)
  int32_t max_batch_size = 0;  // requests per step
  int32_t max_num_rows = 0;    // rows per step, all requests together
  int32_t max_seq_len = 0;     // tokens per request, prompt included
  int32_t verify_width = 0;    // most rows of one draft tree, root included
  int32_t block_size = 0;      // the drafter's block; 0: no drafter
  int32_t max_top_k = 0;       // most ranks per depth from draft()
  int32_t vocab_size = 0;
  // Whether sibling branches leave each other's recurrent state alone.
  TreeState tree_state = TreeState::kExact;
  // Slots hold state beside KV that only running the tokens makes: a prefix can be reused
  // where a snapshot of that state was taken, in one of so many places. 0: nowhere.
  bool recurrent_state = false;
  int32_t state_snapshots = 0;
};

// Results for RowBatch::output_rows, in that order.
struct StepResult {
  std::vector<int32_t> argmax;  // [outputs], ties to the lower id
  std::vector<float> logits;    // [outputs with needs_logits, vocab_size]
};

// Copy the state that a request keeps beside KV, as it is with the first `rows` of a
// commit's rows, to a snapshot.
struct StateSave {
  int32_t rows = 0;
  int32_t snapshot = 0;  // below Capabilities::state_snapshots
};

// Accept `rows` (of the request's segment in the last step, strictly increasing,
// each the child of the one before): their KV and recurrent state become the
// committed prefix; everything else of the step is dropped. `sequence` is as it
// was in that step. With `extend_drafter`, the drafter's context grows by the
// same rows, from the hidden states captured in that step. `saves`, of increasing rows:
// commit passes those states on its way, so that no step has to end where one is wanted.
struct Commit {
  Sequence sequence;
  std::vector<int32_t> rows;
  bool extend_drafter = true;
  std::vector<StateSave> saves = {};
};

// One block-diffusion pass: [bonus token, mask, mask, ...] after the committed prefix.
struct DraftRequest {
  Sequence sequence;
  int32_t bonus_token = 0;
};

// Depth d (from 0) holds the marginal at position committed_length + 1 + d.
struct DraftResult {
  int32_t depth = 0;  // block_size - 1
  int32_t top_k = 0;
  std::vector<float> log_probs;    // [requests, depth, top_k], decreasing
  std::vector<int32_t> token_ids;  // [requests, depth, top_k], ties by lower id
};

class Engine {
 public:
  virtual ~Engine() = default;
  virtual Capabilities capabilities() const = 0;
  virtual StepResult step(const RowBatch& batch) = 0;
  virtual void commit(const std::vector<Commit>& commits) = 0;
  virtual DraftResult draft(const std::vector<DraftRequest>& requests, int32_t top_k) = 0;
  // Give a slot the state of a snapshot: its next step continues tokens that it did not run.
  // Engines without snapshots throw std::invalid_argument.
  virtual void load_state(int32_t /*snapshot*/, int32_t /*slot*/) {
    throw std::invalid_argument("this engine keeps no snapshots of recurrent state");
  }
};

}  // namespace trtree
