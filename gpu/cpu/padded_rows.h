// SPDX-License-Identifier: Apache-2.0
//
// Rows of floats copied to where vectors of any target load them whole: aligned, with zeros past
// the last channel.

#pragma once

#include <hwy/aligned_allocator.h>

#include <cmath>
#include <cstddef>
#include <span>

namespace ebbtide::gpu {

class PaddedRows {
 public:
  static constexpr size_t kAlign = 16;  // Floats in the widest vector.

  // `rows` is [count, head_dim]; every element is multiplied by `factor`.
  PaddedRows(std::span<const float> rows, int head_dim, float factor = 1.0F)
      : dim_(static_cast<size_t>(head_dim)),
        padded_((dim_ + kAlign - 1) / kAlign * kAlign),
        count_(rows.size() / dim_),
        element_(hwy::AllocateAligned<float>(count_ * padded_ + kAlign)) {
    for (size_t r = 0; r < count_; ++r) {
      for (size_t d = 0; d < padded_; ++d) {
        element_[r * padded_ + d] = d < dim_ ? factor * rows[r * dim_ + d] : 0.0F;
      }
    }
  }

  const float* operator[](size_t r) const { return &element_[r * padded_]; }
  float* operator[](size_t r) { return &element_[r * padded_]; }
  size_t padded_dim() const { return padded_; }
  size_t count() const { return count_; }

  // The l2 norm of a row in f64.
  double Norm(size_t r) const {
    double squares = 0;
    for (size_t d = 0; d < dim_; ++d) {
      const double x = element_[r * padded_ + d];
      squares += x * x;
    }
    return std::sqrt(squares);
  }

 private:
  size_t dim_;
  size_t padded_;
  size_t count_;
  hwy::AlignedFreeUniquePtr<float[]> element_;
};

}  // namespace ebbtide::gpu
