// SPDX-License-Identifier: Apache-2.0
//
// How long the rows of a small matrix are, each and together: what the residuals of a page's tokens
// can do to a logit, or to a sum of values. Tested by tests/unit/gpu/matrix_norms_test.cc.

#pragma once

#include <span>

#include "gpu/shape.h"

namespace ebbtide::gpu {

inline constexpr int kMatrixRowsMax = kPageTokensMax;
inline constexpr int kMatrixColumnsMax = kHeadDimMax;

struct MatrixNormsArgs {
  int rows = 0;
  int columns = 0;
  std::span<const float> matrix;  // [rows, columns], finite
};

struct MatrixNorms {
  double each = 0;  // >= |row| of each row, in l2 norm
  double joint =
      0;  // >= |matrix x| and |x matrix| for every x of length 1: its largest singular value
};

// Upper bounds, 0 for a matrix of zeros alone.
//
//   Math      G = matrix matrix^T; each = max_i G_ii^(1/2), joint = |G^8|_F^(1/16). Above the
//   largest
//             singular value by a factor of at most rows^(1/32), by 1 % on residuals of real pages
//   Numerics  the matrix and each power scaled by powers of two, products and sums in f32, each
//             rounded, in the order of columns (or of rows, in powers); norms in f64. What f32 may
//             have lost is added: |G - exact G| <= gamma |matrix|_F^2, and so for each power
//   Repeats   bit for bit on every target, as the reference
//   Cost      rows^2 (columns + 3 rows) products and sums
//   Source    docs/decisions/0002-digest-ladder.md, joint bound
MatrixNorms MatrixNormsReference(const MatrixNormsArgs& args);
MatrixNorms MatrixNormsCpu(const MatrixNormsArgs& args);

// A symmetric matrix of `rows` rows, row i at [i * kMatrixRowsMax]; or any rows to be multiplied.
struct GramArgs {
  int rows = 0;                   // At most kMatrixRowsMax.
  int products = 0;               // Terms of each sum.
  std::span<const float> factor;  // [products, kMatrixRowsMax] zeros from `rows` on
  std::span<float> gram;          // [kMatrixRowsMax, kMatrixRowsMax] out: sum_k factor_ki factor_kj
};

// The norms that any way to multiply leads to.
MatrixNorms MatrixNormsBy(void (*gram)(const GramArgs&), const MatrixNormsArgs& args);

}  // namespace ebbtide::gpu
