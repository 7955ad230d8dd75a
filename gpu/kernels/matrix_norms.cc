// SPDX-License-Identifier: Apache-2.0
//
// What every implementation of matrix norms shares: all but the products.
//
// Let G_0 be the Gram matrix as computed, H_k = G_k / s_k with a power of two s_k, G_(k+1) = H_k^2
// as computed. A sum of m rounded products is off by at most gamma_m = m u / (1 - m u), u = 2^-24,
// of the sum of their magnitudes, so |G_0 - exact| <= gamma |matrix|_F^2 and |G_(k+1) - H_k^2| <=
// gamma |H_k|_F^2 in Frobenius norm, and less so in spectral norm. Hence
//
//   |G_k| = s_k |H_k^2|^(1/2) <= s_k (|G_(k+1)| + gamma |H_k|_F^2)^(1/2),
//
// from |G_3| <= |G_3|_F down to |exact G_0| <= |G_0| + gamma |matrix|_F^2. The squared lengths are
// traces of what the products should be, which differ from those computed by gamma of themselves.
//
// With the largest element and every trace scaled to [1, 2), what falls below the range of f32 is
// below kUnderflow.

#include "gpu/kernels/matrix_norms.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "base/status_macros.h"

namespace ebbtide::gpu {
namespace {

constexpr int kStride = kMatrixRowsMax;
constexpr int kSquarings = 3;
constexpr double kUnderflow = 0x1p-100;
constexpr double kSlack = 1 + 1e-12;  // Far more than f64 rounds off.

double Gamma(int products) {
  constexpr double kUnit = 0x1p-24;
  return products * kUnit / (1 - products * kUnit);
}

// Of rows of kStride, in eight sums that don't wait for each other.
double SquaredLength(const float* matrix, int rows) {
  double sums[8] = {};
  for (int i = 0; i < rows * kStride; i += 8) {
    for (int l = 0; l < 8; ++l) {
      const double element = matrix[i + l];
      sums[l] += element * element;
    }
  }
  double sum = 0;
  for (const double part : sums) sum += part;
  return sum;
}

// Magnitudes are in the order of their bits.
float LargestMagnitude(std::span<const float> elements) {
  uint32_t largest = 0;
  for (const float element : elements) {
    largest = std::max(largest, std::bit_cast<uint32_t>(element) & 0x7FFFFFFFU);
  }
  return std::bit_cast<float>(largest);
}

// The power of two in (x / 2, x].
double PowerBelow(double x) {
  return std::ldexp(1.0, std::ilogb(x));
}

struct Matrix {
  alignas(64) float element[kStride * kStride];

  double Trace(int rows) const {
    double sum = 0;
    for (int i = 0; i < rows; ++i) sum += element[i * (kStride + 1)];
    return sum;
  }
  double LargestDiagonal(int rows) const {
    float largest = 0;
    for (int i = 0; i < rows; ++i) largest = std::max(largest, element[i * (kStride + 1)]);
    return largest;
  }
  void Divide(int rows, double power) {
    const auto factor = static_cast<float>(1 / power);
    for (int i = 0; i < rows * kStride; ++i) element[i] *= factor;
  }
};

void Check(const MatrixNormsArgs& args) {
  EBBTIDE_CHECK(args.rows >= 1 && args.rows <= kMatrixRowsMax, "matrix norms: 1 to 64 rows");
  EBBTIDE_CHECK(args.columns >= 1 && args.columns <= kMatrixColumnsMax,
                "matrix norms: 1 to 256 columns");
  EBBTIDE_CHECK(args.matrix.size() == static_cast<size_t>(args.rows * args.columns),
                "matrix norms: matrix is [rows, columns]");
}

}  // namespace

MatrixNorms MatrixNormsBy(void (*gram)(const GramArgs&), const MatrixNormsArgs& args) {
  Check(args);
  const float largest = LargestMagnitude(args.matrix);
  if (largest == 0) return {};
  const double unit = PowerBelow(largest);
  const double per_unit = 1 / unit;
  const int rows = args.rows;

  alignas(64) float factor[kMatrixColumnsMax * kStride];
  std::fill(factor, factor + args.columns * kStride, 0.0F);
  for (int i = 0; i < rows; ++i) {
    for (int d = 0; d < args.columns; ++d) {
      const double element = args.matrix[static_cast<size_t>(i * args.columns + d)];
      factor[d * kStride + i] = static_cast<float>(element * per_unit);
    }
  }
  Matrix power;
  gram({.rows = rows,
        .products = args.columns,
        .factor = {factor, static_cast<size_t>(args.columns * kStride)},
        .gram = power.element});
  const double inflated = 1 + 2 * Gamma(args.columns);
  const double each = power.LargestDiagonal(rows) * inflated + kUnderflow;
  const double lost_at_first = Gamma(args.columns) * power.Trace(rows) * inflated + kUnderflow;

  double scale[kSquarings];
  double lost[kSquarings];
  for (int k = 0; k < kSquarings; ++k) {
    scale[k] = PowerBelow(power.Trace(rows));
    power.Divide(rows, scale[k]);
    Matrix square;
    gram({.rows = rows, .products = rows, .factor = power.element, .gram = square.element});
    lost[k] = Gamma(rows) * square.Trace(rows) * (1 + 2 * Gamma(rows)) + kUnderflow;
    power = square;
  }
  double norm = std::sqrt(SquaredLength(power.element, rows)) * kSlack;
  for (int k = kSquarings - 1; k >= 0; --k) {
    norm = scale[k] * std::sqrt(norm + lost[k]) * kSlack;
  }
  return {.each = unit * std::sqrt(each) * kSlack,
          .joint = unit * std::sqrt(norm + lost_at_first) * kSlack};
}

}  // namespace ebbtide::gpu
