// SPDX-License-Identifier: Apache-2.0
//
// Norms are upper bounds of what is found in long double by turning the matrix until its rows are
// orthogonal (one-sided Jacobi), without tolerance; no further above it than the formula and
// rounding to integers lead; and equal to the bit everywhere.

#include "gpu/kernels/matrix_norms.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/unit/gpu/each_target.h"

namespace ebbtide::gpu {
namespace {

class MatrixNormsTest : public OnReferenceAndTarget {
 protected:
  MatrixNorms NormsOf(int rows, const std::vector<float>& matrix, JointNorm joint) {
    return Choose(&MatrixNormsReference,
                  &MatrixNormsCpu)({.rows = rows,
                                    .columns = static_cast<int>(matrix.size()) / rows,
                                    .matrix = matrix,
                                    .joint = joint});
  }
};
INSTANTIATE_TEST_SUITE_P(Every, MatrixNormsTest, ReferenceAndEveryTarget(), TargetName);

constexpr JointNorm kJointNorms[] = {JointNorm::kLengths, JointNorm::kGram, JointNorm::kSquare};

using Rows = std::vector<std::vector<long double>>;

long double Dot(const std::vector<long double>& x, const std::vector<long double>& y) {
  long double sum = 0;
  for (size_t d = 0; d < x.size(); ++d) sum += x[d] * y[d];
  return sum;
}

long double Longest(const Rows& rows) {
  long double longest = 0;
  for (const auto& row : rows) longest = std::max(longest, std::sqrt(Dot(row, row)));
  return longest;
}

Rows RowsOf(int count, const std::vector<float>& matrix) {
  Rows rows;
  const size_t columns = matrix.size() / static_cast<size_t>(count);
  for (size_t i = 0; i < matrix.size(); i += columns) {
    rows.emplace_back(matrix.begin() + static_cast<ptrdiff_t>(i),
                      matrix.begin() + static_cast<ptrdiff_t>(i + columns));
  }
  return rows;
}

// Turns pairs of rows until all are orthogonal: their lengths are the singular values then.
long double LargestSingularValue(Rows rows) {
  bool is_turned = true;
  for (int sweep = 0; is_turned && sweep < 40; ++sweep) {
    is_turned = false;
    for (size_t i = 0; i < rows.size(); ++i) {
      for (size_t j = i + 1; j < rows.size(); ++j) {
        const long double both = Dot(rows[i], rows[j]);
        const long double squares[2] = {Dot(rows[i], rows[i]), Dot(rows[j], rows[j])};
        if (std::fabs(both) <= 1e-18L * std::sqrt(squares[0] * squares[1])) continue;
        is_turned = true;
        const long double ratio = (squares[1] - squares[0]) / (2 * both);
        const long double tangent =
            (ratio < 0 ? -1 : 1) / (std::fabs(ratio) + std::sqrt(1 + ratio * ratio));
        const long double cosine = 1 / std::sqrt(1 + tangent * tangent);
        for (size_t d = 0; d < rows[i].size(); ++d) {
          const long double x = rows[i][d];
          rows[i][d] = cosine * (x - tangent * rows[j][d]);
          rows[j][d] = cosine * (tangent * x + rows[j][d]);
        }
      }
    }
  }
  return Longest(rows);
}

struct Sample {
  int rows = 0;
  std::vector<float> matrix = {};
};

std::vector<float> Uniform(int count, double scale, std::mt19937_64& random) {
  std::uniform_real_distribution<double> uniform(-scale, scale);
  std::vector<float> elements;
  for (int i = 0; i < count; ++i) elements.push_back(static_cast<float>(uniform(random)));
  return elements;
}

// Rounding errors as they come, of a few shapes and at the ends of f32; rows that are all alike;
// one element; rows far apart in size.
std::vector<Sample> Samples(std::mt19937_64& random) {
  std::vector<Sample> samples;
  for (const auto& [rows, columns] :
       {std::pair(1, 1), std::pair(3, 7), std::pair(32, 64), std::pair(33, 5), std::pair(64, 70)}) {
    for (const double scale : {1.0 / 30, 1e-38, 1e-44, 1e30}) {
      samples.push_back({rows, Uniform(rows * columns, scale, random)});
    }
    Sample alike{.rows = rows};
    const std::vector<float> row = Uniform(columns, 1, random);
    for (int i = 0; i < rows; ++i) alike.matrix.insert(alike.matrix.end(), row.begin(), row.end());
    samples.push_back(alike);
    Sample one{rows, std::vector<float>(static_cast<size_t>(rows * columns))};
    one.matrix.back() = -3;
    samples.push_back(one);
    Sample apart{rows, Uniform(rows * columns, 1, random)};
    for (size_t i = 0; i < apart.matrix.size(); ++i) {
      apart.matrix[i] *= std::ldexp(1.0F, -static_cast<int>(i % 130));
    }
    samples.push_back(apart);
  }
  return samples;
}

long double Frobenius(const Rows& rows) {
  long double squares = 0;
  for (const auto& row : rows) squares += Dot(row, row);
  return std::sqrt(squares);
}

// rows rows^T
Rows Gram(const Rows& rows) {
  Rows gram(rows.size(), std::vector<long double>(rows.size()));
  for (size_t i = 0; i < rows.size(); ++i) {
    for (size_t j = 0; j < rows.size(); ++j) gram[i][j] = Dot(rows[i], rows[j]);
  }
  return gram;
}

// What the contract's formula makes of the joint norm.
long double JointByFormula(const Rows& rows, JointNorm joint) {
  if (joint == JointNorm::kLengths) return Frobenius(rows);
  Rows power = Gram(rows);
  const long double mean =
      Frobenius(rows) * Frobenius(rows) / static_cast<long double>(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) power[i][i] -= mean;
  if (joint == JointNorm::kGram) return std::sqrt(mean + Frobenius(power));
  return std::sqrt(mean + std::sqrt(Frobenius(Gram(power))));
}

// The largest element is an integer of IntegerBits; halves of one may be lost, and are added, in
// each element.
long double RoundingShare(size_t elements, size_t columns) {
  return std::sqrt(static_cast<long double>(elements)) *
         std::ldexp(1.001L, 1 - IntegerBits(static_cast<int>(columns)));
}

TEST_P(MatrixNormsTest, NormsAreUpperBoundsAndNear) {
  test::ForEachSeed(1, [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (const Sample& sample : Samples(random)) {
      const Rows rows = RowsOf(sample.rows, sample.matrix);
      const size_t columns = rows[0].size();
      const long double singular = LargestSingularValue(rows);
      for (const JointNorm joint : kJointNorms) {
        const MatrixNorms norms = NormsOf(sample.rows, sample.matrix, joint);

        ASSERT_GE(norms.each, Longest(rows));
        ASSERT_LE(norms.each, Longest(rows) * (1 + RoundingShare(columns, columns)));
        ASSERT_GE(norms.joint, singular * (1 - 1e-15L));  // What the sample's own turns round off.
        // Elements of squares are rounded too: to 2^-11 of the largest, each of `rows` in a row.
        const long double rounding =
            RoundingShare(rows.size() * columns, columns) + sample.rows * 0x1p-11L;
        ASSERT_LE(norms.joint, JointByFormula(rows, joint) * (1 + rounding));
      }
    }
  });
}

// As JointNorm says.
TEST_P(MatrixNormsTest, JointComesNearerToTheLargestSingularValueOfRoundingErrorsStepByStep) {
  std::mt19937_64 random(1);
  const std::vector<float> matrix = Uniform(32 * 64, 1.0 / 30, random);
  const auto singular = static_cast<double>(LargestSingularValue(RowsOf(32, matrix)));

  EXPECT_NEAR(NormsOf(32, matrix, JointNorm::kLengths).joint / singular, 3.3, 0.2);
  EXPECT_NEAR(NormsOf(32, matrix, JointNorm::kGram).joint / singular, 1.35, 0.05);
  EXPECT_NEAR(NormsOf(32, matrix, JointNorm::kSquare).joint / singular, 1.06, 0.02);
}

TEST_P(MatrixNormsTest, OrthogonalRowsAreNoLongerTogetherThanEach) {
  std::vector<float> matrix(32 * 32, 0.0F);
  for (size_t i = 0; i < 32; ++i) matrix[i * 33] = 5;
  for (const JointNorm joint : {JointNorm::kGram, JointNorm::kSquare}) {
    const MatrixNorms norms = NormsOf(32, matrix, joint);

    EXPECT_GE(norms.each, 5);
    EXPECT_NEAR(norms.each, 5, 5 * 0x1p-9);
    EXPECT_NEAR(norms.joint, 5, 5 * 0x1p-6);
  }
}

TEST_P(MatrixNormsTest, MatrixOfZerosHasNone) {
  const MatrixNorms norms = NormsOf(4, std::vector<float>(20, -0.0F), JointNorm::kSquare);

  EXPECT_EQ(norms.each, 0);
  EXPECT_EQ(norms.joint, 0);
}

TEST_P(MatrixNormsTest, EveryImplementationMakesTheReferencesBits) {
  std::mt19937_64 random(2);
  for (const Sample& sample : Samples(random)) {
    for (const JointNorm joint : kJointNorms) {
      const MatrixNorms reference =
          MatrixNormsReference({.rows = sample.rows,
                                .columns = static_cast<int>(sample.matrix.size()) / sample.rows,
                                .matrix = sample.matrix,
                                .joint = joint});

      const MatrixNorms norms = NormsOf(sample.rows, sample.matrix, joint);

      ASSERT_EQ(norms.each, reference.each);
      ASSERT_EQ(norms.joint, reference.joint);
    }
  }
}

TEST_P(MatrixNormsTest, MatrixOfTheWrongSizeStopsTheProcess) {
  const std::vector<float> matrix(12);

  EXPECT_DEATH(MatrixNormsReference({.rows = 5, .columns = 3, .matrix = matrix}),
               "matrix is \\[rows, columns\\]");
  EXPECT_DEATH(MatrixNormsReference({.rows = 65, .columns = 3, .matrix = matrix}), "1 to 64 rows");
}

}  // namespace
}  // namespace ebbtide::gpu
