// Mixtures of experts on the CPU: routing, and the chosen experts' gated MLPs. README.md
// defines the arithmetic to the bit.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "plugins/cpu_isa.hpp"
#include "plugins/dense_linear/dense_linear.hpp"
#include "plugins/nvfp4_linear/nvfp4_linear.hpp"
#include "plugins/parallel.hpp"

namespace trtree::moe {

struct Routing {
  int64_t experts = 0;
  int64_t top_k = 0;
  bool sigmoid = false;  // scores; otherwise softmax
  bool normalize = true;
  double scale = 1;
  int64_t groups = 1;
  int64_t top_groups = 1;

  // Throws std::invalid_argument unless the numbers fit each other.
  void check() const;
};

// float32, `stride` floats between rows.
struct Rows {
  const float* data;
  int64_t stride;
};

// logits [rows, experts] -> weights [rows, experts], zero where not chosen. bias: [experts],
// or nullptr.
void route(const Routing& routing, Rows logits, int64_t rows, const float* bias, float* weights,
           int64_t weights_stride, Parallel& parallel);

// The same linear of every expert of a layer: all NVFP4, or all dense.
struct Experts {
  std::vector<nvfp4::Weight> nvfp4;
  std::vector<dense::Weight> dense;
  std::optional<float> input_scale;  // NVFP4: quantizes rows; none rounds them to bf16

  int64_t count() const {
    return static_cast<int64_t>(nvfp4.empty() ? dense.size() : nvfp4.size());
  }
  int64_t in_features() const;
  int64_t out_features() const;
  const Segments& segments() const;
};

// Views of `count` equal weights that lie one after another in `packed`. `first` describes
// the first; global_scales: of each, for NVFP4. Throws std::invalid_argument if they do not fit.
Experts stack(nvfp4::Weight first, std::span<const uint8_t> packed,
              std::span<const float> global_scales, std::optional<float> input_scale);
Experts stack(dense::Weight first, std::span<const uint8_t> packed, int64_t count);

// Rows, or their slots: one row per slot of each row, one after another.
struct SlotRows {
  Rows rows;
  bool in_slots = false;
};

// x [rows, K] or [rows, slots, K] times the vectors [experts, K] of the row's experts -> y [rows,
// slots, K], contiguous; slots behind a row's last expert are zeros. Throws
// std::invalid_argument if a row has more experts than slots.
void scale(SlotRows x, Rows weights, int64_t rows, int64_t experts, int64_t slots,
           const float* vectors, int64_t k, float* y, Parallel& parallel);

// Runs experts over rows; keeps its working memory between calls.
class ExpertRows {
 public:
  // x [rows, K] or [rows, slots, K], weights [rows, experts] -> h [rows, slots, I], contiguous;
  // the experts' out_features are 2 I. Slots behind a row's last expert are zeros. Throws
  // std::invalid_argument if a row has more experts than slots. added: [rows, slots, 2 I], what is
  // added to the products first, or nullptr.
  void up(const Experts& experts, SlotRows x, Rows weights, int64_t rows, int64_t slots,
          const float* added, float* h, Parallel& parallel, Isa isa);
  // x as for `up` -> [rows * slots, O], or the sums of each segment, by each slot's expert; zeros
  // in slots behind a row's last. Scales of NVFP4 experts are not in the sums of segments.
  void linear(const Experts& experts, SlotRows x, Rows weights, int64_t rows, int64_t slots,
              const LinearOutput& output, Parallel& parallel, Isa isa);
  // h as from `up`, weights -> [rows, O], or the sums of each segment.
  void down(const Experts& experts, const float* h, Rows weights, int64_t rows, int64_t slots,
            const LinearOutput& output, Parallel& parallel, Isa isa);

 private:
  // A row that an expert is chosen for, and which of the row's slots is the expert's.
  struct Use {
    int64_t row;
    int64_t slot;
  };

  // Of x what the expert is chosen for.
  void select(SlotRows x, int64_t expert, int64_t slots);
  void group(Rows weights, int64_t rows, int64_t experts, int64_t slots);
  // x: `rows` contiguous inputs of all experts.
  void prepare(const Experts& experts, Rows x, int64_t rows, Parallel& parallel, Isa isa);
  // The expert's product of the rows `selected` of what was prepared.
  void product(const Experts& experts, int64_t expert, const LinearOutput& output,
               Parallel& parallel, Isa isa);
  void sum_segments(const Experts& experts, int64_t rows, const float* sums,
                    const LinearOutput& output, Parallel& parallel) const;

  std::vector<std::vector<Use>> uses_;  // by expert
  std::vector<int64_t> selected_;
  nvfp4::Input nvfp4_all_, nvfp4_selected_;
  dense::Input dense_all_, dense_selected_;
  std::vector<float> product_;
  std::vector<float> sums_;
};

}  // namespace trtree::moe
