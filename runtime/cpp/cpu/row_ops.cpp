#include "runtime/cpp/cpu/row_ops.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "plugins/clones.hpp"
#include "plugins/silu_mul/silu_mul.hpp"

namespace trtree::cpu {

namespace {

constexpr int kPartialSums = 8;

TRTREE_CLONES void norm_part(const float* x, const float* weight, int64_t n, double eps, float* y) {
  double partial[kPartialSums] = {};
  int64_t i = 0;
  for (; i + kPartialSums <= n; i += kPartialSums) {
    for (int p = 0; p < kPartialSums; ++p) {
      partial[p] += static_cast<double>(x[i + p]) * x[i + p];
    }
  }
  for (; i < n; ++i) partial[i % kPartialSums] += static_cast<double>(x[i]) * x[i];
  double squares = 0;
  for (const double p : partial) squares += p;
  const double scale = 1.0 / std::sqrt(squares / static_cast<double>(n) + eps);
  for (int64_t j = 0; j < n; ++j) y[j] = static_cast<float>(x[j] * scale * weight[j]);
}

// parameters: the weight [n], then the bias.
TRTREE_CLONES void layer_norm_part(const float* x, const float* parameters, int64_t n, double eps,
                                   float* y) {
  double total = 0, squares = 0;
  for (int64_t i = 0; i < n; ++i) total += x[i];
  const double mean = total / static_cast<double>(n);
  for (int64_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const double scale = 1.0 / std::sqrt(squares / static_cast<double>(n) + eps);
  for (int64_t i = 0; i < n; ++i) {
    y[i] = static_cast<float>((x[i] - mean) * scale * parameters[i] + parameters[n + i]);
  }
}

TRTREE_CLONES void add_row(const float* a, const float* b, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = a[i] + b[i];
}

TRTREE_CLONES void scale_row(const float* x, const float* weight, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = x[i] * weight[i];
}

// The first of the largest, or -1 if there is a NaN.
TRTREE_CLONES int32_t argmax_row(const float* x, int64_t n) {
  constexpr int kParts = 16;
  float best[kParts];
  int32_t nan[kParts] = {};
  for (float& b : best) b = -INFINITY;
  int64_t i = 0;
  for (; i + kParts <= n; i += kParts) {
    for (int p = 0; p < kParts; ++p) {
      best[p] = x[i + p] > best[p] ? x[i + p] : best[p];
      nan[p] |= x[i + p] != x[i + p];
    }
  }
  float highest = -INFINITY;
  int32_t any_nan = 0;
  for (int p = 0; p < kParts; ++p) {
    highest = best[p] > highest ? best[p] : highest;
    any_nan |= nan[p];
  }
  for (; i < n; ++i) {
    highest = x[i] > highest ? x[i] : highest;
    any_nan |= x[i] != x[i];
  }
  if (any_nan) return -1;
  for (int64_t j = 0; j < n; ++j) {
    if (x[j] == highest) return static_cast<int32_t>(j);
  }
  return -1;
}

}  // namespace

void rms_norm(const Matrix& x, const float* weight, int64_t heads, double eps, const Matrix& y) {
  const int64_t n = x.width / heads;
  for (int64_t r = 0; r < y.rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      norm_part(x.row(r) + h * n, weight, n, eps, y.row(r) + h * n);
    }
  }
}

void layer_norm(const Matrix& x, const float* parameters, int64_t heads, double eps,
                const Matrix& y) {
  const int64_t n = x.width / heads;
  for (int64_t r = 0; r < y.rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      layer_norm_part(x.row(r) + h * n, parameters, n, eps, y.row(r) + h * n);
    }
  }
}

void rotary_angles(std::span<const int32_t> positions, const PlanRope& rope, double* angles) {
  const size_t n = rope.inv_freq.size();
  for (size_t r = 0; r < positions.size(); ++r) {
    double* const of_row = angles + r * 2 * n;
    for (size_t i = 0; i < n; ++i) {
      const double angle = positions[r] * rope.inv_freq[i];
      of_row[i] = std::cos(angle) * rope.scaling;
      of_row[n + i] = std::sin(angle) * rope.scaling;
    }
  }
}

void rotary_embedding(const Matrix& x, const double* angles, const PlanRope& rope, int64_t heads,
                      const Matrix& y) {
  const auto n = static_cast<int64_t>(rope.inv_freq.size());
  const int64_t head_dim = x.width / heads;
  // Element i of a pair list stands at i * step, its partner `apart` behind it.
  const int64_t step = rope.interleaved ? 2 : 1;
  const int64_t apart = rope.interleaved ? 1 : n;
  for (int64_t r = 0; r < y.rows; ++r) {
    const double* const cosines = angles + r * 2 * n;
    const double* const sines = cosines + n;
    for (int64_t h = 0; h < heads; ++h) {
      const float* const from = x.row(r) + h * head_dim;
      float* const to = y.row(r) + h * head_dim;
      for (int64_t i = 0; i < n; ++i) {
        const double a = from[i * step], b = from[i * step + apart];
        to[i * step] = static_cast<float>(a * cosines[i] - b * sines[i]);
        to[i * step + apart] = static_cast<float>(b * cosines[i] + a * sines[i]);
      }
      for (int64_t i = 2 * n; i < head_dim; ++i) to[i] = from[i];
    }
  }
}

void silu_mul(const Matrix& gate, const Matrix& up, const Matrix& y, Isa isa) {
  const trtree::silu_mul::RowKernel kernel = trtree::silu_mul::row_kernel(isa);
  for (int64_t r = 0; r < y.rows; ++r) kernel(gate.row(r), up.row(r), y.width, y.row(r));
}

void sigmoid_mul(const Matrix& x, const Matrix& gate, const Matrix& y) {
  const int64_t step = gate.width == 1 ? 0 : 1;
  for (int64_t r = 0; r < y.rows; ++r) {
    const float *const from = x.row(r), *const gates = gate.row(r);
    float* const to = y.row(r);
    for (int64_t i = 0; i < y.width; ++i) {
      to[i] = static_cast<float>(from[i] / (1.0 + std::exp(-double{gates[i * step]})));
    }
  }
}

void split_heads(const Matrix& x, int64_t heads, std::span<const Matrix> parts) {
  for (int64_t r = 0; r < x.rows; ++r) {
    const float* from = x.row(r);
    for (int64_t h = 0; h < heads; ++h) {
      for (const Matrix& part : parts) {
        const int64_t n = part.width / heads;
        std::copy_n(from, n, part.row(r) + h * n);
        from += n;
      }
    }
  }
}

void concat(std::span<const Matrix> parts, int64_t heads, const Matrix& y) {
  for (int64_t r = 0; r < y.rows; ++r) {
    float* to = y.row(r);
    for (int64_t h = 0; h < heads; ++h) {
      for (const Matrix& part : parts) {
        const int64_t n = part.width / heads;
        to = std::copy_n(part.row(r) + h * n, n, to);
      }
    }
  }
}

void scale(const Matrix& x, const float* weight, int64_t heads, const Matrix& y) {
  const int64_t width = y.width / heads;
  for (int64_t r = 0; r < y.rows; ++r) {
    for (int64_t h = 0; h < heads; ++h) {
      scale_row(x.row(r) + h * width, weight, width, y.row(r) + h * width);
    }
  }
}

void add(const Matrix& a, const Matrix& b, const Matrix& y) {
  for (int64_t r = 0; r < y.rows; ++r) add_row(a.row(r), b.row(r), y.width, y.row(r));
}

void argmax(const Matrix& logits, const std::string& op, int32_t* result, Parallel& parallel) {
  parallel.parallel_for(logits.rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) result[r] = argmax_row(logits.row(r), logits.width);
  });
  for (int64_t r = 0; r < logits.rows; ++r) {
    if (result[r] < 0) {
      throw std::runtime_error(op + ": NaN in the logits of output row " + std::to_string(r) +
                               "; a weight or an activation overflowed");
    }
  }
}

}  // namespace trtree::cpu
