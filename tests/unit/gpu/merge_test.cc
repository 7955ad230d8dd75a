// SPDX-License-Identifier: Apache-2.0
//
// Merge against attention over everything at once, and its neutral element.

#include "gpu/kernels/merge.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/unit/gpu/each_target.h"

namespace ebbtide::gpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Partial attentions of some rows.
struct Part {
  Part(int rows_in, int head_dim_in) : rows(rows_in), head_dim(head_dim_in) {
    output.resize(static_cast<size_t>(rows * head_dim));
    lse.resize(static_cast<size_t>(rows));
  }
  Part(int rows_in, int head_dim_in, std::mt19937_64& random) : Part(rows_in, head_dim_in) {
    std::normal_distribution<float> normal;
    for (float& element : output) element = normal(random);
    for (float& element : lse) element = 5 * normal(random);
  }
  MergeArgs With(const Part& part) {
    return {.rows = rows,
            .head_dim = head_dim,
            .part_output = part.output,
            .part_lse = part.lse,
            .output = output,
            .lse = lse};
  }

  int rows;
  int head_dim;
  std::vector<float> output;
  std::vector<float> lse;
};

// In long double, from masses and not from weights.
Part Exact(const Part& a, const Part& b) {
  Part joined(a.rows, a.head_dim);
  for (size_t row = 0; row < a.lse.size(); ++row) {
    const long double mass = std::exp(static_cast<long double>(a.lse[row]));
    const long double part_mass = std::exp(static_cast<long double>(b.lse[row]));
    joined.lse[row] = static_cast<float>(std::log(mass + part_mass));
    const auto head_dim = static_cast<size_t>(a.head_dim);
    for (size_t i = row * head_dim; i < (row + 1) * head_dim; ++i) {
      joined.output[i] =
          static_cast<float>((mass * a.output[i] + part_mass * b.output[i]) / (mass + part_mass));
    }
  }
  return joined;
}

TEST(MergeReferenceTest, JoinsTwoPartsAsIfAttendedTogether) {
  test::ForEachSeed(10, [](uint64_t seed) {
    std::mt19937_64 random(seed);
    const int head_dim = std::uniform_int_distribution<int>(1, 256)(random);
    Part whole(7, head_dim, random);
    const Part part(7, head_dim, random);
    const Part exact = Exact(whole, part);

    MergeReference(whole.With(part));

    for (size_t i = 0; i < whole.output.size(); ++i) {
      ASSERT_NEAR(whole.output[i], exact.output[i], 1.2e-7 * (1 + std::fabs(exact.output[i]))) << i;
    }
    for (size_t row = 0; row < whole.lse.size(); ++row) {
      ASSERT_NEAR(whole.lse[row], exact.lse[row], 1.2e-7 * (1 + std::fabs(exact.lse[row]))) << row;
    }
  });
}

class MergeOnTarget : public OnTarget {
 protected:
  void Merge(const MergeArgs& args) const { Choose(&MergeCpu, &MergeOnCuda)(args); }
};
INSTANTIATE_TEST_SUITE_P(EveryTarget, MergeOnTarget, EveryTargetAndCuda(), TargetName);

TEST_P(MergeOnTarget, GivesTheBitsOfTheReference) {
  test::ForEachSeed(10, [this](uint64_t seed) {
    std::mt19937_64 random(seed);
    const int rows = std::uniform_int_distribution<int>(0, 9)(random);
    const int head_dim = std::uniform_int_distribution<int>(1, 256)(random);
    Part expected(rows, head_dim, random);
    Part whole = expected;
    const Part part(rows, head_dim, random);

    MergeReference(expected.With(part));
    Merge(whole.With(part));

    ASSERT_EQ(whole.output, expected.output);
    ASSERT_EQ(whole.lse, expected.lse);
  });
}

TEST_P(MergeOnTarget, PartThatSawNothingChangesNothing) {
  std::mt19937_64 random(test::RandomSeed());
  Part whole(3, 20, random);
  const Part before = whole;
  Part nothing(3, 20);
  nothing.lse.assign(3, kMinusInfinity);

  Merge(whole.With(nothing));
  EXPECT_EQ(whole.output, before.output);
  EXPECT_EQ(whole.lse, before.lse);

  Merge(nothing.With(before));
  EXPECT_EQ(nothing.output, before.output);
  EXPECT_EQ(nothing.lse, before.lse);
}

TEST_P(MergeOnTarget, NothingAndNothingStayNothing) {
  Part whole(2, 5);
  whole.lse.assign(2, kMinusInfinity);
  const Part nothing = whole;

  Merge(whole.With(nothing));

  EXPECT_EQ(whole.output, std::vector<float>(10, 0.0F));
  EXPECT_EQ(whole.lse, std::vector<float>(2, kMinusInfinity));
}

TEST_P(MergeOnTarget, MassesFarApartDoNotOverflow) {
  Part whole(2, 4);
  whole.output.assign(8, 1.0F);
  whole.lse = {3e38F, -3e38F};
  Part part(2, 4);
  part.output.assign(8, 2.0F);
  part.lse = {-3e38F, 3e38F};

  Merge(whole.With(part));

  EXPECT_EQ(whole.output, (std::vector<float>{1, 1, 1, 1, 2, 2, 2, 2}));
  EXPECT_EQ(whole.lse, (std::vector<float>{3e38F, 3e38F}));
}

}  // namespace
}  // namespace ebbtide::gpu
