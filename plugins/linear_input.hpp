// Storage for the prepared rows that a linear reads: kept between calls, grown on demand.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <span>

#include "plugins/linear_job.hpp"

namespace trtree {

class RowBuffer {
 public:
  // Room for `rows` of `row_bytes`; the contents are undefined afterwards.
  void resize(int64_t rows, int64_t row_bytes) {
    // An odd number of cache lines, or rows would compete for the same few cache sets.
    constexpr int64_t kLine = kPackedAlignment;
    stride_ = ((row_bytes + kLine - 1) / kLine | 1) * kLine;
    rows_ = rows;
    if (rows * stride_ <= capacity_) return;
    capacity_ = rows * stride_;
    data_.reset(static_cast<uint8_t*>(::operator new(capacity_, std::align_val_t(kLine))));
  }

  // The given rows of another buffer, in this order.
  void select(const RowBuffer& from, std::span<const int64_t> rows) {
    resize(static_cast<int64_t>(rows.size()), from.stride_);
    for (int64_t r = 0; r < rows_; ++r) std::memcpy(row(r), from.row(rows[r]), stride_);
  }

  uint8_t* row(int64_t r) { return data_.get() + r * stride_; }
  const uint8_t* row(int64_t r) const { return data_.get() + r * stride_; }
  int64_t rows() const { return rows_; }
  int64_t stride() const { return stride_; }

 private:
  struct Free {
    void operator()(uint8_t* data) const {
      ::operator delete(data, std::align_val_t(kPackedAlignment));
    }
  };
  std::unique_ptr<uint8_t, Free> data_;
  int64_t capacity_ = 0;
  int64_t stride_ = 0;
  int64_t rows_ = 0;
};

}  // namespace trtree
