// What the bindings of the linears share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "plugins/linear_job.hpp"
#include "plugins/parallel.hpp"
#include "plugins/stored_rows.hpp"

namespace trtree::bindings {

namespace nb = nanobind;

template <typename T, size_t kDims>
using InputArray = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
template <typename T>
using OutputArray = nb::ndarray<nb::numpy, T>;

template <typename Array>
auto span(const Array& array) {
  return std::span(array.data(), array.size());
}

// Parts of a matrix along its rows, uint8 [rows, bytes] each; rows need not be contiguous.
using Parts = std::vector<nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>>;

// `row_bytes`: what every row has.
inline std::vector<StoredRows> stored_rows(const Parts& parts, int64_t row_bytes) {
  std::vector<StoredRows> rows;
  for (const auto& part : parts) {
    if (static_cast<int64_t>(part.shape(1)) != row_bytes || part.stride(1) != 1) {
      throw std::invalid_argument(
          "rows of " + std::to_string(part.shape(1)) + " bytes, " + std::to_string(part.stride(1)) +
          " apart: expected contiguous ones of " + std::to_string(row_bytes));
    }
    rows.push_back({part.data(), static_cast<int64_t>(part.shape(0)), part.stride(0)});
  }
  return rows;
}

using PackedArray = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A new array, aligned as packed weights are; its elements are not set.
template <typename T>
OutputArray<T> new_array(std::initializer_list<size_t> shape) {
  constexpr std::align_val_t kAlignment{kPackedAlignment};
  size_t size = sizeof(T);
  for (size_t extent : shape) size *= extent;
  void* data = ::operator new(size, kAlignment);
  nb::capsule owner(data, [](void* p) noexcept { ::operator delete(p, kAlignment); });
  return OutputArray<T>(static_cast<T*>(data), shape, owner);
}

inline Segments segments(const std::optional<std::vector<int64_t>>& bounds, int64_t k) {
  const int64_t blocks = (k + kBlock - 1) / kBlock;
  return bounds ? Segments::from_bounds(*bounds, blocks) : Segments::even(blocks);
}

inline const float* bias_of(const std::optional<InputArray<float, 1>>& bias, int64_t columns) {
  if (!bias) return nullptr;
  if (static_cast<int64_t>(bias->shape(0)) == columns) return bias->data();
  throw std::invalid_argument("bias has " + std::to_string(bias->shape(0)) +
                              " elements, the linear " + std::to_string(columns) + " outputs");
}

// Calls run(output) without the GIL and returns what it wrote: [rows, columns], or
// [rows, segments, columns].
template <typename Run>
OutputArray<float> linear_output(int64_t rows, int64_t columns, const Segments& segments,
                                 bool partial_sums, const Run& run) {
  const size_t r = rows, s = segments.count, c = columns;
  auto y = partial_sums ? new_array<float>({r, s, c}) : new_array<float>({r, c});
  const LinearOutput output = partial_sums
                                  ? LinearOutput{y.data(), segments.count * columns, columns}
                                  : LinearOutput{y.data(), columns};
  {
    nb::gil_scoped_release release;
    run(output);
  }
  return y;
}

}  // namespace trtree::bindings
