// SPDX-License-Identifier: Apache-2.0
//
// How long the rows of a small matrix are, each and together: what the residuals of a page's tokens
// can do to a logit, or to a sum of values. Tested by tests/unit/gpu/matrix_norms_test.cc.

#pragma once

#include <cstdint>
#include <span>

#include "gpu/shape.h"

namespace ebbtide::gpu {

inline constexpr int kMatrixRowsMax = kPageTokensMax;
inline constexpr int kMatrixColumnsMax = kHeadDimMax;

// How near the joint norm comes to the largest singular value, each step for its price. Where rows
// differ as rounding errors do (32 of 64 columns), it lies above it by 230, 35 and 6 %.
enum class JointNorm : uint8_t { kLengths = 0, kGram = 1, kSquare = 2 };

struct MatrixNormsArgs {
  int rows = 0;
  int columns = 0;
  std::span<const float> matrix;  // [rows, columns], finite
  JointNorm joint = JointNorm::kSquare;
};

struct MatrixNorms {
  double each = 0;  // >= |row| of each row, in l2 norm
  double joint =
      0;  // >= |matrix x| and |x matrix| for every x of length 1: its largest singular value
};

// Upper bounds, 0 for a matrix of zeros alone.
//
//   Math      G = matrix matrix^T, m the mean of its diagonal; each = max_i G_ii^(1/2); joint =
//             |matrix|_F from lengths, (m + |G - m|_F)^(1/2) from the Gram matrix,
//             (m + |(G - m)^2|_F^(1/2))^(1/2) from its square
//   Numerics  the matrix and G - m rounded to integers of at most 12 bits, products and sums exact;
//             what rounding to integers may have lost is added in f64
//   Repeats   bit for bit on every target, as the reference
//   Cost      rows^2 columns / 2 products of 16-bit integers for G, rows^3 / 2 for its square
//   Source    docs/decisions/0002-digest-ladder.md, joint bound
MatrixNorms MatrixNormsReference(const MatrixNormsArgs& args);
MatrixNorms MatrixNormsCpu(const MatrixNormsArgs& args);

// What implementations find, in integers. The proof is in matrix_norms.cc.
struct IntegerNorms {
  int exponent = 0;     // The matrix is 2^exponent Q, but for halves.
  int64_t longest = 0;  // Squared length of the longest row of Q
  int64_t lengths = 0;  // Sum of the rows' squared lengths
  // From the Gram matrix on:
  int shift[2] = {};    // H is (Q Q^T - m) / 2^shift, rounded; its square H^2 / 2^shift
  int64_t squares = 0;  // Of all elements of the last of them
};
MatrixNorms NormsFrom(const IntegerNorms& integers, const MatrixNormsArgs& args);

// m: the mean of the diagonal of Q Q^T, rounded down.
constexpr int32_t MeanOf(const IntegerNorms& integers, int rows) {
  return static_cast<int32_t>(integers.lengths / rows);
}

// Integers have at most so many bits that the sum of `terms` of their products has 31.
constexpr int IntegerBits(int terms) {
  return terms <= 64 ? 12 : 11;
}

// The exponent that makes `largest`, the largest magnitude of a matrix, an integer of so many bits.
int ExponentOf(float largest, int columns);

// How far elements of an integer matrix are to be shifted for another product, `largest` being the
// largest magnitude.
int ShiftOf(uint32_t largest);

// Stops the process where the matrix disagrees with its shape.
void CheckMatrixNorms(const MatrixNormsArgs& args);

}  // namespace ebbtide::gpu
