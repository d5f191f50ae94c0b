#include "plugins/gated_delta_net/cpu.hpp"

#include <algorithm>
#include <cmath>

#include "plugins/clones.hpp"

namespace trtree::gated_delta_net {

namespace {

constexpr double kUnitEps = 1e-6;  // as in reference.py

// x / |x| * scale.
void unit(const float* x, int64_t n, double scale, float* y) {
  double squares = kUnitEps;
  for (int64_t i = 0; i < n; ++i) squares += static_cast<double>(x[i]) * x[i];
  const double factor = scale / std::sqrt(squares);
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<float>(x[i] * factor);
}

double softplus(double x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }

// to = decay * from; read = to^T k.
TRTREE_CLONES void decay_and_read(const float* from, float decay, const float* k, int64_t key_dim,
                                  int64_t value_dim, float* to, float* read) {
  std::fill_n(read, value_dim, 0.0f);
  for (int64_t i = 0; i < key_dim; ++i) {
    const float* const row = from + i * value_dim;
    float* const next = to + i * value_dim;
#pragma GCC ivdep  // the two are apart, or the same
    for (int64_t j = 0; j < value_dim; ++j) {
      const float value = decay * row[j];
      next[j] = value;
      read[j] += value * k[i];
    }
  }
}

// state += k u^T; out = state^T q.
TRTREE_CLONES void add_and_read(const float* k, const float* u, const float* q, int64_t key_dim,
                                int64_t value_dim, float* state, float* out) {
  std::fill_n(out, value_dim, 0.0f);
  for (int64_t i = 0; i < key_dim; ++i) {
    float* const row = state + i * value_dim;
    for (int64_t j = 0; j < value_dim; ++j) {
      const float value = row[j] + k[i] * u[j];
      row[j] = value;
      out[j] += value * q[i];
    }
  }
}

// The same update again, in place: every element sees the operations above, in their order.
TRTREE_CLONES void repeat_update(float decay, const float* k, const float* u, int64_t key_dim,
                                 int64_t value_dim, float* state) {
  for (int64_t i = 0; i < key_dim; ++i) {
    float* const row = state + i * value_dim;
    for (int64_t j = 0; j < value_dim; ++j) {
      const float value = decay * row[j];
      row[j] = value + k[i] * u[j];
    }
  }
}

}  // namespace

void run(const Shape& shape, const Operands& operands, const float* committed,
         std::span<const branch::Segment> segments, std::span<const branch::Order> orders,
         Updates& updates, float* output, int64_t output_stride, Parallel& parallel) {
  int64_t rows = 0;
  for (const branch::Segment& segment : segments) rows += segment.num_rows;
  updates.keys.resize(rows * shape.keys());
  updates.added.resize(rows * shape.values());
  updates.decay.resize(rows * shape.value_heads);
  std::vector<float> queries(rows * shape.keys());
  const double scale = 1.0 / std::sqrt(static_cast<double>(shape.key_dim));
  parallel.parallel_for(rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t h = 0; h < shape.key_heads; ++h) {
        const int64_t at = h * shape.key_dim, to = r * shape.keys() + at;
        unit(operands.q.data + r * operands.q.stride + at, shape.key_dim, scale, &queries[to]);
        unit(operands.k.data + r * operands.k.stride + at, shape.key_dim, 1.0, &updates.keys[to]);
      }
      for (int64_t h = 0; h < shape.value_heads; ++h) {
        const double a = operands.a.data[r * operands.a.stride + h];
        const double a_log = operands.gates[h], bias = operands.gates[shape.value_heads + h];
        const double g = -std::exp(a_log) * softplus(a + bias);
        updates.decay[r * shape.value_heads + h] = static_cast<float>(std::exp(g));
      }
    }
  });

  const int64_t size = shape.head_state();
  const auto tasks = static_cast<int64_t>(segments.size()) * shape.value_heads;
  parallel.parallel_for(tasks, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> buffers;
    std::vector<float> read(shape.value_dim);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t index = task / shape.value_heads, h = task % shape.value_heads;
      const branch::Segment& segment = segments[index];
      const int64_t key_head = h / (shape.value_heads / shape.key_heads);
      const std::vector<float> zeros(segment.fresh ? size : 0);
      const float* const start =
          segment.fresh ? zeros.data() : committed + segment.slot * shape.state_size() + h * size;
      buffers.resize(std::max<size_t>(buffers.size(), orders[index].buffers * size));
      for (const branch::Visit& visit : orders[index].visits) {
        const int64_t r = segment.first_row + visit.row;
        const float* const from =
            visit.from == branch::kCommitted ? start : buffers.data() + visit.from * size;
        float* const state = buffers.data() + visit.to * size;
        const int64_t key = r * shape.keys() + key_head * shape.key_dim;
        const int64_t value = r * shape.values() + h * shape.value_dim;
        const float* const k = &updates.keys[key];
        float* const u = &updates.added[value];
        const float* const v = operands.v.data + r * operands.v.stride + h * shape.value_dim;
        decay_and_read(from, updates.decay[r * shape.value_heads + h], k, shape.key_dim,
                       shape.value_dim, state, read.data());
        const double b = operands.b.data[r * operands.b.stride + h];
        const auto beta = static_cast<float>(1.0 / (1.0 + std::exp(-b)));
        for (int64_t j = 0; j < shape.value_dim; ++j) u[j] = beta * (v[j] - read[j]);
        add_and_read(k, u, &queries[key], shape.key_dim, shape.value_dim, state,
                     output + r * output_stride + h * shape.value_dim);
      }
    }
  });
}

void commit(const Shape& shape, float* committed, const branch::Segment& segment,
            std::span<const int32_t> rows, const Updates& updates) {
  if (rows.empty()) return;
  float* const state = committed + segment.slot * shape.state_size();
  if (segment.fresh) std::fill_n(state, shape.state_size(), 0.0f);
  for (const int32_t row : rows) {
    const int64_t r = segment.first_row + row;
    for (int64_t h = 0; h < shape.value_heads; ++h) {
      const int64_t key_head = h / (shape.value_heads / shape.key_heads);
      repeat_update(updates.decay[r * shape.value_heads + h],
                    &updates.keys[r * shape.keys() + key_head * shape.key_dim],
                    &updates.added[r * shape.values() + h * shape.value_dim], shape.key_dim,
                    shape.value_dim, state + h * shape.head_state());
    }
  }
}

}  // namespace trtree::gated_delta_net
