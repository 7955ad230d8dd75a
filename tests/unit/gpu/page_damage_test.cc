// SPDX-License-Identifier: Apache-2.0
//
// Page damage against its meaning: what attention gives without the page, in long double, beside
// what it gives with it. Once from a lane's own keys and values, through the parts that attend
// leaves, and then from parts drawn at random, whose weights come as near to 1 as floats can say.

#include "gpu/kernels/page_damage.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/kernels/attend.h"
#include "tests/support/random_seed.h"
#include "tests/unit/gpu/each_target.h"
#include "tests/unit/gpu/kernel_grid.h"
#include "tests/unit/gpu/sample_lane.h"
#include "tests/unit/gpu/scores_on_cuda.h"

namespace ebbtide::gpu {
namespace {

using testing::Each;

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr size_t kNoPage = SIZE_MAX;

double Norm(std::span<const float> row) {
  double squares = 0;
  for (const float x : row) squares += std::pow(x, 2.0);
  return std::sqrt(squares);
}

// Partial attentions of pages and what they are together.
struct Parts {
  Parts(int pages_in, int rows_in, int head_dim_in)
      : pages(static_cast<size_t>(pages_in)),
        rows(static_cast<size_t>(rows_in)),
        dim(static_cast<size_t>(head_dim_in)),
        part_output(pages * rows * dim),
        part_lse(pages * rows),
        output(rows * dim),
        lse(rows) {}
  Parts(int pages_in, int rows_in, int head_dim_in, double spread, std::mt19937_64& random)
      : Parts(pages_in, rows_in, head_dim_in) {
    std::normal_distribution<double> normal;
    for (float& x : part_output) x = static_cast<float>(normal(random));
    for (float& x : part_lse) x = static_cast<float>(spread * normal(random));
    Join();
  }

  std::span<const float> part(size_t p, size_t r) const {
    return std::span(part_output).subspan((p * rows + r) * dim, dim);
  }

  // Row r over all pages but one; nothing of none is 0.
  std::vector<long double> Without(size_t r, size_t left_out,
                                   long double* log_total = nullptr) const {
    long double peak = kMinusInfinity;
    for (size_t p = 0; p < pages; ++p) {
      if (p != left_out) peak = std::max<long double>(peak, part_lse[p * rows + r]);
    }
    std::vector<long double> sum(dim, 0.0L);
    long double total = 0;
    for (size_t p = 0; p < pages && peak != kMinusInfinity; ++p) {
      if (p == left_out) continue;
      const long double weight = std::exp(part_lse[p * rows + r] - peak);
      total += weight;
      for (size_t d = 0; d < dim; ++d) sum[d] += weight * part(p, r)[d];
    }
    for (long double& x : sum) x = total > 0 ? x / total : 0;
    if (log_total != nullptr) *log_total = total > 0 ? peak + std::log(total) : peak;
    return sum;
  }

  void Join() {
    for (size_t r = 0; r < rows; ++r) {
      long double exact = 0;
      const std::vector<long double> joined = Without(r, kNoPage, &exact);
      for (size_t d = 0; d < dim; ++d) output[r * dim + d] = static_cast<float>(joined[d]);
      lse[r] = static_cast<float>(exact);
    }
  }

  // ||o - o without p||, root of the sum of squares over rows.
  double ErrorWithout(size_t p) const {
    long double squares = 0;
    for (size_t r = 0; r < rows; ++r) {
      const std::vector<long double> with = Without(r, kNoPage);
      const std::vector<long double> without = Without(r, p);
      for (size_t d = 0; d < dim; ++d) squares += std::pow(with[d] - without[d], 2.0L);
    }
    return static_cast<double>(std::sqrt(squares));
  }

  // What outputs in f32 leave open: a share's odds, 1 at most, times their rounding.
  double Rounding(size_t p) const {
    double sum = 0;
    for (size_t r = 0; r < rows; ++r) {
      const double share =
          std::min(0.5, std::exp(static_cast<double>(part_lse[p * rows + r]) - lse[r]));
      sum += share / (1 - share) * 0x1p-24 *
             (Norm(part(p, r)) + Norm(std::span(output).subspan(r * dim, dim)));
    }
    return sum;
  }

  PageDamageArgs Args(std::span<float> damage) const {
    return {.head_dim = static_cast<int>(dim),
            .rows = static_cast<int>(rows),
            .pages = static_cast<int>(pages),
            .part_output = part_output,
            .part_lse = part_lse,
            .output = output,
            .lse = lse,
            .damage = damage};
  }

  size_t pages, rows, dim;
  std::vector<float> part_output, part_lse, output, lse;
};

class PageDamageTest : public OnReferenceAndTarget {
 protected:
  void Run(const PageDamageArgs& args) const {
    Choose(&PageDamageReference, &PageDamageCpu, &PageDamageOnCuda)(args);
  }
  std::vector<float> Damage(const Parts& parts) const {
    std::vector<float> damage(parts.pages, -1.0F);
    Run(parts.Args(damage));
    return damage;
  }

  std::mt19937_64 random_{test::RandomSeed()};
};
INSTANTIATE_TEST_SUITE_P(Every, PageDamageTest, ReferenceTargetsAndCuda(), TargetName);

// A lane and a group of queries that ask it, with all of its pages and without one.
struct Asked {
  Asked(Dtype dtype, int rows, double spread, std::mt19937_64& random)
      : lane({.dtype = dtype,
              .head_dim = 24,
              .slots = 150,
              .extent_slots = 32,
              .empty_one_in = 6,
              .poison_empty = true},
             random),
        query(static_cast<size_t>(rows) * lane.dim()) {
    std::normal_distribution<double> normal(0, spread);
    for (float& x : query) x = static_cast<float>(normal(random));
  }

  // Row r over all slots but [first, end), in long double.
  std::vector<long double> Without(size_t r, size_t first, size_t end) const {
    std::vector<long double> sum(lane.dim(), 0.0L);
    long double total = 0;
    for (size_t s = 0; s < lane.slots(); ++s) {
      if (lane.is_empty(s) || (s >= first && s < end)) continue;
      long double dot = 0;
      for (size_t d = 0; d < lane.dim(); ++d) dot += query[r * lane.dim() + d] * lane.key(s, d);
      const long double weight = std::exp(kScale * dot);
      total += weight;
      for (size_t d = 0; d < lane.dim(); ++d) sum[d] += weight * lane.value(s, d);
    }
    for (long double& x : sum) x /= total;
    return sum;
  }

  double ErrorWithout(size_t first, size_t end) const {
    long double squares = 0;
    for (size_t r = 0; r < query.size() / lane.dim(); ++r) {
      const auto with = Without(r, 0, 0);
      const auto without = Without(r, first, end);
      for (size_t d = 0; d < lane.dim(); ++d) squares += std::pow(with[d] - without[d], 2.0L);
    }
    return static_cast<double>(std::sqrt(squares));
  }

  static constexpr float kScale = 0.25F;
  SampleLane lane;
  std::vector<float> query;
};

TEST_P(PageDamageTest, DamageIsTheErrorOfAttendingWithoutThePage) {
  for (const Dtype dtype : kDtypes) {
    for (const double spread : {0.1, 1.0, 6.0}) {
      const Asked asked(dtype, 3, spread, random_);
      const auto pages = static_cast<int>(asked.lane.extents().size());
      Parts parts(pages, 3, asked.lane.options().head_dim);
      const int32_t last = 1000;

      Choose(&AttendReference, &AttendCpu,
             &AttendOnCuda)({.dtype = dtype,
                             .head_dim = asked.lane.options().head_dim,
                             .group = 3,
                             .scale = Asked::kScale,
                             .extents = asked.lane.extents(),
                             .query = asked.query,
                             .query_index = {&last, 1},
                             .output = parts.output,
                             .lse = parts.lse,
                             .logits = {},
                             .part_output = parts.part_output,
                             .part_lse = parts.part_lse});
      const std::vector<float> damage = Damage(parts);

      for (size_t p = 0, first = 0; p < parts.pages; ++p) {
        const size_t end = first + static_cast<size_t>(asked.lane.extents()[p].slots);
        const double exact = asked.ErrorWithout(first, end);
        // What attend rounds off: 1e-6 of each output and of each weight.
        EXPECT_NEAR(damage[p], exact, 2e-5 * exact + 40 * parts.Rounding(p)) << p << " " << spread;
        first = end;
      }
    }
  }
}

TEST_P(PageDamageTest, DamageIsWhatTheOtherPartsMakeWithoutThePage) {
  for (const double spread : {0.1, 1.0, 3.0, 10.0}) {
    const Parts parts(20, 3, 24, spread, random_);

    const std::vector<float> damage = Damage(parts);

    for (size_t p = 0; p < parts.pages; ++p) {
      const double exact = parts.ErrorWithout(p);
      EXPECT_NEAR(damage[p], exact, 1e-5 * exact + parts.Rounding(p) + 1e-18) << p << " " << spread;
    }
  }
}

TEST_P(PageDamageTest, WeightNextToOneStaysExact) {
  for (const float peak : {5.0F, 20.0F, 60.0F, 400.0F, 5000.0F}) {
    Parts parts(20, 2, 16, 1.0, random_);
    parts.part_lse[7 * 2] = peak;
    parts.Join();

    const std::vector<float> damage = Damage(parts);

    EXPECT_NEAR(damage[7], parts.ErrorWithout(7), 1e-5 * parts.ErrorWithout(7)) << peak;
  }
}

TEST_P(PageDamageTest, OnlyPageIsWorthItsOutput) {
  const Parts parts(1, 1, 8, 1.0, random_);
  const double norm = Norm(parts.part_output);

  EXPECT_NEAR(Damage(parts)[0], norm, 1e-5 * norm);
}

TEST_P(PageDamageTest, WhatIsAttendedBesideThePagesCountsAsOthers) {
  Parts whole(6, 2, 16, 1.0, random_);
  whole.part_lse[3 * 2] = 30.0F;  // Row 0 needs the others of page 3, the rest among them.
  whole.Join();
  const std::vector<float> expected = Damage(whole);

  std::vector<float> damage(5);
  PageDamageArgs args = whole.Args(damage);
  args.pages = 5;
  args.part_output = std::span(whole.part_output).first(size_t{5} * 2 * 16);
  args.part_lse = std::span(whole.part_lse).first(size_t{5} * 2);
  args.rest_output = std::span(whole.part_output).last(size_t{2} * 16);
  args.rest_lse = std::span(whole.part_lse).last(2);
  Run(args);

  for (size_t p = 0; p < 5; ++p) EXPECT_NEAR(damage[p], expected[p], 2e-6 * expected[p]) << p;
}

TEST_P(PageDamageTest, RowThatSawNothingAddsNothing) {
  Parts both(12, 2, 16, 1.0, random_);
  Parts one(12, 1, 16);
  for (size_t p = 0; p < both.pages; ++p) {
    both.part_lse[2 * p + 1] = kMinusInfinity;
    std::fill_n(&both.part_output[(2 * p + 1) * 16], 16, 0.0F);
    one.part_lse[p] = both.part_lse[2 * p];
    std::copy_n(&both.part_output[2 * p * 16], 16, &one.part_output[p * 16]);
  }
  both.Join();
  one.Join();

  EXPECT_EQ(Damage(both), Damage(one));
}

// Whatever its parts say, and whatever the rest that nobody attends to holds.
TEST_P(PageDamageTest, WhatNobodySawIsNotLookedAt) {
  Parts parts(4, 1, 16, 1.0, random_);
  parts.part_lse[1] = 30.0F;
  parts.Join();
  const std::vector<float> expected = Damage(parts);
  const std::vector<float> rest(16, std::numeric_limits<float>::quiet_NaN());
  std::vector<float> damage(4);
  PageDamageArgs args = parts.Args(damage);
  args.rest_output = rest;
  args.rest_lse = {&kMinusInfinity, 1};
  Run(args);
  EXPECT_EQ(damage, expected);

  parts.lse[0] = kMinusInfinity;

  EXPECT_THAT(Damage(parts), Each(0.0F));
}

// What the others attend to cancels but for 1e-8, and so does what the page holds.
TEST_P(PageDamageTest, OthersThatCancelAreAddedUpInDoubles) {
  Parts parts(3, 1, 8);
  parts.part_lse = {0.0F, -1.0F, 20.0F};
  std::fill_n(parts.part_output.begin(), 8, 1.0F);
  std::fill_n(parts.part_output.begin() + 8, 8, -std::exp(1.0F));
  parts.Join();

  EXPECT_NEAR(Damage(parts)[2], parts.ErrorWithout(2), 1e-5 * parts.ErrorWithout(2) + 1e-30);
}

TEST_P(PageDamageTest, PageThatNobodySeesIsWorthNothing) {
  Parts parts(5, 3, 40, 1.0, random_);
  for (size_t r = 0; r < 3; ++r) parts.part_lse[2 * 3 + r] = kMinusInfinity;
  parts.part_lse[4 * 3] = 50.0F;  // Row 0 sees little else.
  parts.Join();

  const std::vector<float> damage = Damage(parts);

  EXPECT_EQ(damage[2], 0.0F);
  for (const size_t p : {0U, 1U, 3U, 4U}) EXPECT_GT(damage[p], 0.0F) << p;
}

// Two pages that are half of everything: their shares, rounded, may pass 1/2.
TEST_P(PageDamageTest, EqualPagesHaveEqualDamage) {
  for (int repeat = 0; repeat < 40; ++repeat) {
    Parts parts(9, 3, 77, 1.0, random_);
    const bool are_halves = repeat % 2 == 0;
    for (size_t i = 0; i < parts.part_lse.size(); ++i) parts.part_lse[i] -= are_halves ? 40 : 0;
    for (size_t r = 0; r < 3; ++r) {
      const float lse = are_halves ? 3 + static_cast<float>(r) / 7 + static_cast<float>(repeat) : 0;
      parts.part_lse[3 * 1 + r] = parts.part_lse[3 * 6 + r] = lse;
      std::copy_n(&parts.part_output[(3 * 1 + r) * 77], 77, &parts.part_output[(3 * 6 + r) * 77]);
    }
    parts.Join();

    const std::vector<float> damage = Damage(parts);

    EXPECT_EQ(damage[1], damage[6]) << repeat;
    EXPECT_NEAR(damage[1], parts.ErrorWithout(1), 1e-5 * parts.ErrorWithout(1) + parts.Rounding(1));
  }
}

TEST_P(PageDamageTest, DamageIsFiniteWhateverTheParts) {
  constexpr float kMost = std::numeric_limits<float>::max();
  Parts parts(6, 2, 20, 30.0, random_);
  for (size_t i = 0; i < parts.part_output.size(); ++i) {
    parts.part_output[i] = i % 3 == 0 ? kMost / 4 : i % 3 == 1 ? -kMost / 4 : 1e-42F;
  }
  parts.part_lse[0] = 3e38F;
  parts.part_lse[3] = -3e38F;
  parts.Join();
  for (const float damage : Damage(parts)) EXPECT_TRUE(std::isfinite(damage));

  parts.lse = {-80.0F, 2e38F};  // Not what they add up to.
  for (const float damage : Damage(parts)) EXPECT_TRUE(std::isfinite(damage));
}

TEST_P(PageDamageTest, TinyOutputsAreNotLost) {
  Parts parts(8, 2, 24, 2.0, random_);
  for (float& x : parts.part_output) x *= 1e-25F;  // Squares are below what f32 holds.
  parts.Join();

  const std::vector<float> damage = Damage(parts);

  for (size_t p = 0; p < parts.pages; ++p) {
    EXPECT_NEAR(damage[p], parts.ErrorWithout(p), 1e-5 * parts.ErrorWithout(p) + parts.Rounding(p));
  }
}

TEST_P(PageDamageTest, AgreesWithTheReferenceAtEverySize) {
  for (const int head_dim : kHeadDims) {
    for (int rows = 1; rows <= kGroupMax; rows += kGroupStep) {
      for (const double spread : {1.0, 8.0}) {
        const Parts parts(3 + (head_dim + 7 * rows) % 40, rows, head_dim, spread, random_);
        const Parts rest(1, rows, head_dim, spread, random_);
        std::vector<float> expected(parts.pages), damage(parts.pages);
        PageDamageArgs args = parts.Args(expected);
        if (rows % 2 == 0) {
          args.rest_output = rest.part_output;
          args.rest_lse = rest.part_lse;
        }
        PageDamageReference(args);
        args.damage = damage;

        Run(args);

        ExpectNear(damage, expected, 1.1e-5, 1e-30);
        ASSERT_FALSE(HasFailure()) << head_dim << " " << rows;
      }
    }
  }
}

// More rows than a warp has threads, and more pages than a block takes.
TEST_P(PageDamageTest, ManyRowsAndPagesAreAllCounted) {
  const Parts parts(70, 70, 20, 4.0, random_);
  std::vector<float> expected(parts.pages);
  PageDamageReference(parts.Args(expected));

  const std::vector<float> damage = Damage(parts);

  ExpectNear(damage, expected, 1.1e-5, 1e-30);
  EXPECT_EQ(damage, Damage(parts)) << "bits differ from call to call";
}

TEST_P(PageDamageTest, NoPagesAreAnswered) {
  const Parts parts(0, 2, 16);
  Run(parts.Args({}));
}

TEST(PageDamageCheckTest, SpansThatDisagreeWithTheShapeStopTheProcess) {
  std::mt19937_64 random(1);
  const Parts parts(4, 2, 8, 1.0, random);
  std::vector<float> damage(4);

  PageDamageArgs args = parts.Args(damage);
  args.part_lse = args.part_lse.first(7);
  EXPECT_DEATH(PageDamageCpu(args), "part_lse is .pages, rows.");
  args = parts.Args(std::span(damage).first(3));
  EXPECT_DEATH(PageDamageCpu(args), "damage is .pages.");
  args = parts.Args(damage);
  args.rest_lse = parts.lse;
  EXPECT_DEATH(PageDamageCpu(args), "rest_output is .*or empty with rest_lse");
}

}  // namespace
}  // namespace ebbtide::gpu
