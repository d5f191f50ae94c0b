// The CPU engine's ops that work on one row at a time: a row's result depends on nothing
// else in the step, and on no instruction set.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "plugins/cpu_isa.hpp"
#include "plugins/parallel.hpp"
#include "runtime/cpp/cpu/plan.hpp"

namespace trtree::cpu {

// float32 [rows, width], `stride` floats between rows.
struct Matrix {
  float* data = nullptr;
  int64_t rows = 0;
  int64_t width = 0;
  int64_t stride = 0;

  float* row(int64_t r) const { return data + r * stride; }
  Matrix slice(int64_t begin, int64_t end) const {
    return {row(begin), end - begin, width, stride};
  }
};

// x / sqrt(mean(x^2) + eps) * weight over each of `heads` equal parts of a row; float64 inside.
void rms_norm(const Matrix& x, const float* weight, int64_t heads, double eps, const Matrix& y);

// (x - mean) / sqrt(variance + eps) * weight + bias over each of `heads` equal parts of a row;
// parameters: the weight, then the bias. float64 inside.
void layer_norm(const Matrix& x, const float* parameters, int64_t heads, double eps,
                const Matrix& y);

// cos and sin of position * inv_freq, times scaling: float64 [rows, 2 * n], cosines first.
void rotary_angles(std::span<const int32_t> positions, const PlanRope& rope, double* angles);

// Rotates each of `heads` equal parts of a row; float64 inside.
void rotary_embedding(const Matrix& x, const double* angles, const PlanRope& rope, int64_t heads,
                      const Matrix& y);

// gate / (1 + exp(-gate)) * up.
void silu_mul(const Matrix& gate, const Matrix& up, const Matrix& y, Isa isa);

// x * sigmoid(gate); the gate has x's width, or is one number per row. float64 inside.
void sigmoid_mul(const Matrix& x, const Matrix& gate, const Matrix& y);

// Each of `heads` equal parts of a row, cut into the parts' own; copies.
void split_heads(const Matrix& x, int64_t heads, std::span<const Matrix> parts);

// The parts' `heads` equal parts of a row side by side, head by head.
void concat(std::span<const Matrix> parts, int64_t heads, const Matrix& y);

// x * weight, one number per column of each of `heads` equal parts of a row.
void scale(const Matrix& x, const float* weight, int64_t heads, const Matrix& y);

void add(const Matrix& a, const Matrix& b, const Matrix& y);

// The first of the largest logits of each row. Throws std::runtime_error, naming `op` and
// the row, where one is NaN.
void argmax(const Matrix& logits, const std::string& op, int32_t* result, Parallel& parallel);

}  // namespace trtree::cpu
