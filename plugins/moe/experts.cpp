#include <algorithm>
#include <stdexcept>
#include <string>

#include "plugins/moe/moe.hpp"
#include "plugins/silu_mul/silu_mul.hpp"

namespace trtree::moe {
namespace {

// Floats that one thread should write before another is worth waking.
constexpr int64_t kGrainFloats = 16384;

int64_t grain(int64_t width) { return std::max<int64_t>(1, kGrainFloats / width); }

void check_stack(std::span<const uint8_t> packed, int64_t count) {
  if (count > 0 && packed.size() % count == 0 && packed.size() / count % kPackedAlignment == 0) {
    return;
  }
  throw std::invalid_argument(std::to_string(packed.size()) + " bytes of " + std::to_string(count) +
                              " experts: each must take a multiple of 64");
}

void check_slots(int64_t row, int64_t experts, int64_t slots) {
  if (experts <= slots) return;
  throw std::invalid_argument("row " + std::to_string(row) + " has " + std::to_string(experts) +
                              " experts, there are " + std::to_string(slots) + " slots");
}

}  // namespace

int64_t Experts::in_features() const {
  return nvfp4.empty() ? dense.front().in_features : nvfp4.front().in_features;
}

int64_t Experts::out_features() const {
  return nvfp4.empty() ? dense.front().out_features : nvfp4.front().out_features;
}

const Segments& Experts::segments() const {
  return nvfp4.empty() ? dense.front().segments : nvfp4.front().segments;
}

Experts stack(nvfp4::Weight first, std::span<const uint8_t> packed,
              std::span<const float> global_scales, std::optional<float> input_scale) {
  const auto count = static_cast<int64_t>(global_scales.size());
  check_stack(packed, count);
  const size_t bytes = packed.size() / count;
  Experts result;
  result.input_scale = input_scale;
  for (int64_t e = 0; e < count; ++e) {
    first.packed = packed.subspan(e * bytes, bytes);
    first.global_scale = global_scales[e];
    result.nvfp4.push_back(first);
  }
  return result;
}

Experts stack(dense::Weight first, std::span<const uint8_t> packed, int64_t count) {
  check_stack(packed, count);
  const size_t bytes = packed.size() / count;
  Experts result;
  for (int64_t e = 0; e < count; ++e) {
    first.packed = packed.subspan(e * bytes, bytes);
    result.dense.push_back(first);
  }
  return result;
}

void scale(SlotRows x, Rows weights, int64_t rows, int64_t experts, int64_t slots,
           const float* vectors, int64_t k, float* y, Parallel& parallel) {
  const auto chosen = [&](int64_t r) {
    return std::span(weights.data + r * weights.stride, experts);
  };
  for (int64_t r = 0; r < rows; ++r) {
    const auto row = chosen(r);
    check_slots(r, experts - std::count(row.begin(), row.end(), 0.0f), slots);
  }
  parallel.parallel_for(rows, grain(slots * k), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const auto row = chosen(r);
      const float* from = x.rows.data + (x.in_slots ? r * slots * k : r * x.rows.stride);
      float* to = y + r * slots * k;
      for (int64_t e = 0; e < experts; ++e) {
        if (row[e] == 0.0f) continue;
        const float* const vector = vectors + e * k;
        for (int64_t j = 0; j < k; ++j) to[j] = from[j] * vector[j];
        to += k;
        if (x.in_slots) from += k;
      }
      std::fill(to, y + (r + 1) * slots * k, 0.0f);
    }
  });
}

void ExpertRows::group(Rows weights, int64_t rows, int64_t experts, int64_t slots) {
  uses_.resize(experts);
  for (auto& uses : uses_) uses.clear();
  for (int64_t r = 0; r < rows; ++r) {
    const float* const row = weights.data + r * weights.stride;
    int64_t slot = 0;
    for (int64_t e = 0; e < experts; ++e) {
      if (row[e] != 0.0f) uses_[e].push_back({r, slot++});
    }
    check_slots(r, slot, slots);
  }
}

void ExpertRows::prepare(const Experts& experts, Rows x, int64_t rows, Parallel& parallel,
                         Isa isa) {
  const int64_t k = experts.in_features();
  if (experts.nvfp4.empty()) {
    dense_all_.assign(x.data, rows, k, x.stride);
  } else if (experts.input_scale) {
    nvfp4_all_.quantize(x.data, rows, k, x.stride, *experts.input_scale, parallel, isa);
  } else {
    nvfp4_all_.round_to_bf16(x.data, rows, k, x.stride, parallel, isa);
  }
}

void ExpertRows::product(const Experts& experts, int64_t expert, const LinearOutput& output,
                         Parallel& parallel, Isa isa) {
  if (experts.nvfp4.empty()) {
    dense_selected_.select(dense_all_, selected_);
    dense::linear(experts.dense[expert], dense_selected_, output, parallel, isa);
  } else {
    nvfp4_selected_.select(nvfp4_all_, selected_);
    nvfp4::linear(experts.nvfp4[expert], nvfp4_selected_, output, parallel, isa);
  }
}

void ExpertRows::select(SlotRows x, int64_t expert, int64_t slots) {
  selected_.clear();
  for (const Use& use : uses_[expert]) {
    selected_.push_back(x.in_slots ? use.row * slots + use.slot : use.row);
  }
}

void ExpertRows::linear(const Experts& experts, SlotRows x, Rows weights, int64_t rows,
                        int64_t slots, const LinearOutput& output, Parallel& parallel, Isa isa) {
  const int64_t columns = experts.out_features();
  const bool in_segments = output.segment_stride > 0;
  const int64_t parts = in_segments ? experts.segments().count : 1;
  group(weights, rows, experts.count(), slots);
  prepare(experts, x.rows, x.in_slots ? rows * slots : rows, parallel, isa);
  const auto each_part = [&](int64_t row, const float* from) {
    float* const to = output.data + row * output.row_stride;
    for (int64_t p = 0; p < parts; ++p) {
      float* const part = to + p * output.segment_stride;
      if (from == nullptr) {
        std::fill_n(part, columns, 0.0f);
      } else {
        std::copy_n(from + p * columns, columns, part);
      }
    }
  };
  for (int64_t row = 0; row < rows * slots; ++row) each_part(row, nullptr);
  for (int64_t e = 0; e < experts.count(); ++e) {
    const std::vector<Use>& uses = uses_[e];
    if (uses.empty()) continue;
    select(x, e, slots);
    product_.resize(uses.size() * parts * columns);
    product(experts, e, {product_.data(), parts * columns, in_segments ? columns : 0}, parallel,
            isa);
    for (size_t i = 0; i < uses.size(); ++i) {
      each_part(uses[i].row * slots + uses[i].slot, product_.data() + i * parts * columns);
    }
  }
}

void ExpertRows::up(const Experts& experts, SlotRows x, Rows weights, int64_t rows, int64_t slots,
                    const float* added, float* h, Parallel& parallel, Isa isa) {
  const int64_t both = experts.out_features(), width = both / 2;
  group(weights, rows, experts.count(), slots);
  prepare(experts, x.rows, x.in_slots ? rows * slots : rows, parallel, isa);
  std::fill_n(h, rows * slots * width, 0.0f);
  const auto silu_mul = silu_mul::row_kernel(isa);
  for (int64_t e = 0; e < experts.count(); ++e) {
    const std::vector<Use>& uses = uses_[e];
    if (uses.empty()) continue;
    select(x, e, slots);
    product_.resize(uses.size() * both);
    product(experts, e, {product_.data(), both}, parallel, isa);
    const auto n = static_cast<int64_t>(uses.size());
    parallel.parallel_for(n, grain(width), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        float* const gate = product_.data() + i * both;
        if (added != nullptr) {
          const float* const more = added + (uses[i].row * slots + uses[i].slot) * both;
          for (int64_t j = 0; j < both; ++j) gate[j] += more[j];
        }
        silu_mul(gate, gate + width, width, h + (uses[i].row * slots + uses[i].slot) * width);
      }
    });
  }
}

void ExpertRows::down(const Experts& experts, const float* h, Rows weights, int64_t rows,
                      int64_t slots, const LinearOutput& output, Parallel& parallel, Isa isa) {
  const int64_t columns = experts.out_features(), k = experts.in_features();
  const int64_t row_floats = experts.segments().count * columns;
  group(weights, rows, experts.count(), slots);
  prepare(experts, {h, k}, rows * slots, parallel, isa);
  sums_.assign(rows * row_floats, 0.0f);
  for (int64_t e = 0; e < experts.count(); ++e) {
    const std::vector<Use>& uses = uses_[e];
    if (uses.empty()) continue;
    selected_.clear();
    for (const Use& use : uses) selected_.push_back(use.row * slots + use.slot);
    product_.resize(uses.size() * row_floats);
    product(experts, e, {product_.data(), row_floats, columns}, parallel, isa);
    const float scale = experts.nvfp4.empty() ? 1.0f
                                              : nvfp4::output_scale(experts.nvfp4[e].global_scale,
                                                                    experts.input_scale);
    const auto n = static_cast<int64_t>(uses.size());
    parallel.parallel_for(n, grain(row_floats), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const float factor = weights.data[uses[i].row * weights.stride + e] * scale;
        const float* const part = product_.data() + i * row_floats;
        float* const sum = sums_.data() + uses[i].row * row_floats;
        for (int64_t j = 0; j < row_floats; ++j) sum[j] += part[j] * factor;
      }
    });
  }
  sum_segments(experts, rows, sums_.data(), output, parallel);
}

void ExpertRows::sum_segments(const Experts& experts, int64_t rows, const float* sums,
                              const LinearOutput& output, Parallel& parallel) const {
  const int64_t columns = experts.out_features(), count = experts.segments().count;
  parallel.parallel_for(rows, grain(count * columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const float* const from = sums + r * count * columns;
      float* const to = output.data + r * output.row_stride;
      if (output.segment_stride == 0) std::fill_n(to, columns, 0.0f);
      for (int64_t s = 0; s < count; ++s) {
        const float* const segment = from + s * columns;
        if (output.segment_stride == 0) {
          for (int64_t j = 0; j < columns; ++j) to[j] += segment[j];
        } else {
          std::copy_n(segment, columns, to + s * output.segment_stride);
        }
      }
    }
  });
}

}  // namespace trtree::moe
