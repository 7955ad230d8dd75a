// SPDX-License-Identifier: Apache-2.0
//
// What every implementation of matrix norms shares: all but integers.
//
// With c = 2^exponent, matrix = c (Q + E) where no element of E is above 1/2 but for what falls
// below the range of f32, so that in spectral norm
//
//   |matrix| <= c (|Q| + |E|_F),  |E|_F <= (1/2 + tiny) (rows columns)^(1/2),
//
// and a row of Q is off by (1/2 + tiny) columns^(1/2). Q Q^T is exact, |Q|^2 = |Q Q^T| is at most
// its trace, and |Q Q^T| <= m + |Q Q^T - m| for any m >= 0. H is symmetric, and off by at most 1/2
// in each element from what it was shifted from, and so is its square:
//
//   |Q Q^T - m| <= 2^shift (|H| + rows / 2),  |H|^2 = |H^2| <= 2^shift (|its square| + rows / 2),
//
// where the last norm is at most that of Frobenius.

#include "gpu/kernels/matrix_norms.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>

#include "base/status_macros.h"

namespace ebbtide::gpu {
namespace {

constexpr double kSlack = 1 + 1e-12;         // Far more than f64 rounds off.
constexpr double kRounding = 0.5 + 0x1p-20;  // Far more than f32 loses at the end of its range.

}  // namespace

void CheckMatrixNorms(const MatrixNormsArgs& args) {
  EBBTIDE_CHECK(args.rows >= 1 && args.rows <= kMatrixRowsMax, "matrix norms: 1 to 64 rows");
  EBBTIDE_CHECK(args.columns >= 1 && args.columns <= kMatrixColumnsMax,
                "matrix norms: 1 to 256 columns");
  EBBTIDE_CHECK(args.matrix.size() == static_cast<size_t>(args.rows * args.columns),
                "matrix norms: matrix is [rows, columns]");
}

int ExponentOf(float largest, int columns) {
  return std::ilogb(largest) - (IntegerBits(columns) - 1);
}

int ShiftOf(uint32_t largest) {
  return std::max(0, static_cast<int>(std::bit_width(largest)) - IntegerBits(kMatrixRowsMax));
}

MatrixNorms NormsFrom(const IntegerNorms& integers, const MatrixNormsArgs& args) {
  const auto before_shift = [&](double norm, int shift) {
    return std::ldexp(norm + (shift > 0 ? 0.5 * args.rows : 0), shift) * kSlack;
  };
  double squared = static_cast<double>(integers.lengths);
  if (args.joint != JointNorm::kLengths) {
    double norm = std::sqrt(static_cast<double>(integers.squares));
    if (args.joint == JointNorm::kSquare) norm = std::sqrt(before_shift(norm, integers.shift[1]));
    squared = MeanOf(integers, args.rows) + before_shift(norm, integers.shift[0]);
  }
  const double unit = std::ldexp(1.0, integers.exponent);
  const double off = kRounding * std::sqrt(args.columns);
  const double each = std::sqrt(static_cast<double>(integers.longest)) + off;
  const double joint = std::sqrt(squared) + off * std::sqrt(args.rows);
  return {.each = unit * each * kSlack, .joint = unit * joint * kSlack};
}

}  // namespace ebbtide::gpu
