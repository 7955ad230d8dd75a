// SPDX-License-Identifier: Apache-2.0
//
// Powers of a matrix by plain loops over integers.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <vector>

#include "gpu/kernels/matrix_norms.h"

namespace ebbtide::gpu {
namespace {

using Integers = std::vector<std::vector<int32_t>>;

// `matrix` in units of 2^exponent, to the nearest integer, ties to even.
Integers Rounded(const MatrixNormsArgs& args, int exponent) {
  Integers rounded(static_cast<size_t>(args.rows));
  for (size_t i = 0; i < args.matrix.size(); ++i) {
    const double element = std::ldexp(static_cast<double>(args.matrix[i]), -exponent);
    rounded[i / static_cast<size_t>(args.columns)].push_back(
        static_cast<int32_t>(std::nearbyint(element)));
  }
  return rounded;
}

// matrix matrix^T
Integers Gram(const Integers& matrix) {
  Integers gram(matrix.size(), std::vector<int32_t>(matrix.size()));
  for (size_t i = 0; i < matrix.size(); ++i) {
    for (size_t j = 0; j < matrix.size(); ++j) {
      for (size_t k = 0; k < matrix[i].size(); ++k) gram[i][j] += matrix[i][k] * matrix[j][k];
    }
  }
  return gram;
}

// Shifts `matrix` down for another product; returns by how much.
int Shift(Integers& matrix) {
  uint32_t largest = 0;
  for (const auto& row : matrix) {
    for (const int32_t element : row)
      largest = std::max(largest, static_cast<uint32_t>(std::abs(element)));
  }
  const int shift = ShiftOf(largest);
  if (shift == 0) return 0;
  for (auto& row : matrix) {
    for (int32_t& element : row) element = (element + (1 << (shift - 1))) >> shift;
  }
  return shift;
}

int64_t SumOfSquares(const Integers& matrix) {
  int64_t squares = 0;
  for (const auto& row : matrix) {
    for (const int32_t element : row) squares += int64_t{element} * element;
  }
  return squares;
}

}  // namespace

MatrixNorms MatrixNormsReference(const MatrixNormsArgs& args) {
  CheckMatrixNorms(args);
  float largest = 0;
  for (const float element : args.matrix) largest = std::max(largest, std::fabs(element));
  if (largest == 0) return {};
  IntegerNorms integers;
  integers.exponent = ExponentOf(largest, args.columns);
  Integers matrix = Gram(Rounded(args, integers.exponent));
  for (size_t i = 0; i < matrix.size(); ++i) {
    integers.lengths += matrix[i][i];
    integers.longest = std::max<int64_t>(integers.longest, matrix[i][i]);
  }
  for (size_t i = 0; i < matrix.size(); ++i) matrix[i][i] -= MeanOf(integers, args.rows);
  integers.shift[0] = Shift(matrix);
  if (args.joint == JointNorm::kSquare) {
    matrix = Gram(matrix);
    integers.shift[1] = Shift(matrix);
  }
  integers.squares = SumOfSquares(matrix);
  return NormsFrom(integers, args);
}

}  // namespace ebbtide::gpu
