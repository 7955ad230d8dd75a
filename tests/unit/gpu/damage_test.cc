// SPDX-License-Identifier: Apache-2.0
//
// Damage against its meaning: attention is computed again without the token, in long double, and
// the outputs compared. A score that only looks like CAOTE does not pass.

#include "gpu/kernels/damage.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/unit/gpu/forbidden_memory.h"
#include "tests/unit/gpu/implementation.h"
#include "tests/unit/gpu/sample_lane.h"
#include "tests/unit/gpu/scores_on_cuda.h"

namespace ebbtide::gpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Logits over a lane and, worked out in long double, what attention over them gives.
struct Question {
  Question(const SampleLane& lane_in, int rows_in, double spread, std::mt19937_64& random)
      : lane(lane_in), rows(static_cast<size_t>(rows_in)) {
    std::normal_distribution<double> normal;
    logits.resize(rows * lane.slots());
    for (size_t i = 0; i < logits.size(); ++i) {
      logits[i] = lane.is_empty(i % lane.slots()) ? kMinusInfinity
                                                  : static_cast<float>(spread * normal(random));
    }
    Answer();
  }

  // Attention of row r over [first, end) but for `left_out`.
  std::vector<long double> Output(size_t r, size_t left_out,
                                  long double* log_total = nullptr) const {
    const float* row = logits.data() + r * lane.slots();
    const float peak = *std::max_element(row, row + lane.slots());
    std::vector<long double> sum(lane.dim(), 0.0L);
    long double total = 0;
    for (size_t s = 0; s < lane.slots(); ++s) {
      if (s == left_out || lane.is_empty(s)) continue;
      const long double weight = std::exp(static_cast<long double>(row[s]) - peak);
      total += weight;
      for (size_t d = 0; d < lane.dim(); ++d) sum[d] += weight * lane.value(s, d);
    }
    if (total > 0) {
      for (long double& x : sum) x /= total;
    }
    if (log_total != nullptr) *log_total = peak + std::log(total);
    return sum;
  }

  void Answer() {
    lse.assign(rows, 0.0F);
    output.clear();
    for (size_t r = 0; r < rows; ++r) {
      long double exact = 0;
      for (const long double x : Output(r, lane.slots(), &exact)) {
        output.push_back(static_cast<float>(x));
      }
      lse[r] = static_cast<float>(exact);
    }
  }

  // ||o - o without s||, root of the sum of squares over rows.
  double ErrorWithout(size_t s) const {
    long double sum = 0;
    for (size_t r = 0; r < rows; ++r) {
      const auto with = Output(r, lane.slots());
      const auto without = Output(r, s);
      for (size_t d = 0; d < lane.dim(); ++d) {
        sum += (with[d] - without[d]) * (with[d] - without[d]);
      }
    }
    return static_cast<double>(std::sqrt(sum));
  }

  // What an f32 output leaves open: a / (1 - a) times its rounding.
  double OutputRounding(size_t s) const {
    double sum = 0;
    for (size_t r = 0; r < rows; ++r) {
      const double x = static_cast<double>(logits[r * lane.slots() + s]) - lse[r];
      double norm = 0;
      for (size_t d = 0; d < lane.dim(); ++d) {
        norm += std::pow(output[r * lane.dim() + d], 2.0);
      }
      const double a = std::min(0.5, std::exp(x));
      sum += a / (1 - a) * 0x1p-24 * std::sqrt(norm);
    }
    return sum;
  }

  DamageArgs Args(std::span<float> damage) const {
    return {.dtype = lane.options().dtype,
            .head_dim = lane.options().head_dim,
            .rows = static_cast<int>(rows),
            .extents = lane.extents(),
            .logits = logits,
            .lse = lse,
            .centre = output,
            .damage = damage};
  }

  const SampleLane& lane;
  size_t rows;
  std::vector<float> logits;
  std::vector<float> lse;
  std::vector<float> output;
};

class DamageTest : public testing::TestWithParam<ImplementationCase> {
 protected:
  std::vector<float> Damage(const Question& question) {
    std::vector<float> damage(question.lane.slots(), -1.0F);
    Run(question.Args(damage));
    return damage;
  }

  void Run(const DamageArgs& args) {
    implementation_.Choose(DamageReference, DamageCpu, DamageOnCuda)(args);
  }

  Implementation implementation_{GetParam().name};

  std::mt19937_64 random_{test::RandomSeed()};
};

TEST_P(DamageTest, DamageIsTheErrorOfAttendingWithoutTheToken) {
  for (const double spread : {0.1, 1.0, 3.0, 10.0}) {
    const SampleLane lane({.dtype = GetParam().dtype,
                           .head_dim = 24,
                           .slots = 70,
                           .extent_slots = 32,
                           .empty_one_in = 6,
                           .poison_empty = true},
                          random_);
    const Question question(lane, 3, spread, random_);

    const std::vector<float> damage = Damage(question);

    for (size_t s = 0; s < lane.slots(); ++s) {
      const double exact = lane.is_empty(s) ? 0 : question.ErrorWithout(s);
      // 1e-18: the difference of two outputs of size 1 in long double.
      EXPECT_NEAR(damage[s], exact, 1e-5 * exact + question.OutputRounding(s) + 1e-18) << s;
    }
  }
}

TEST_P(DamageTest, WeightNextToOneStaysExact) {
  for (const float peak : {5.0F, 20.0F, 60.0F, 400.0F, 5000.0F}) {
    const SampleLane lane({.dtype = GetParam().dtype, .head_dim = 16, .slots = 20}, random_);
    Question question(lane, 2, 1.0, random_);
    question.logits[7] = peak;
    question.Answer();

    const std::vector<float> damage = Damage(question);

    EXPECT_NEAR(damage[7], question.ErrorWithout(7), 1e-5 * question.ErrorWithout(7)) << peak;
  }
}

// Their shares, rounded, may pass 1/2, and which form they take is not to part them: between tokens
// that are alike it is their age that decides.
TEST_P(DamageTest, TwoEqualHalvesHaveEqualDamage) {
  SampleLane lane({.dtype = GetParam().dtype, .head_dim = 24, .slots = 20}, random_);
  for (size_t d = 0; d < lane.dim(); ++d) lane.set_value(11, d, lane.value(3, d));
  for (int repeat = 0; repeat < 40; ++repeat) {
    Question question(lane, 2, 1.0, random_);
    for (size_t r = 0; r < 2; ++r) {
      const float half = 30 + static_cast<float>(repeat) + static_cast<float>(r) / 7;
      question.logits[20 * r + 3] = question.logits[20 * r + 11] = half;
    }
    question.Answer();

    const std::vector<float> damage = Damage(question);

    EXPECT_EQ(damage[3], damage[11]) << repeat;
    EXPECT_NEAR(damage[3], question.ErrorWithout(3),
                1e-5 * question.ErrorWithout(3) + question.OutputRounding(3));
  }
}

TEST_P(DamageTest, OnlyTokenIsWorthItsValue) {
  const SampleLane lane({.dtype = GetParam().dtype, .head_dim = 8, .slots = 1}, random_);
  const Question question(lane, 1, 1.0, random_);
  double norm = 0;
  for (size_t d = 0; d < 8; ++d) norm += lane.value(0, d) * lane.value(0, d);

  EXPECT_NEAR(Damage(question)[0], std::sqrt(norm), 1e-5 * std::sqrt(norm));
}

TEST_P(DamageTest, TokensAttendedElsewhereCountAsOthers) {
  const SampleLane lane(
      {.dtype = GetParam().dtype, .head_dim = 16, .slots = 24, .extent_slots = 12}, random_);
  Question whole(lane, 2, 1.0, random_);
  whole.logits[3] = 30.0F;  // One dominant token in row 0: its leave-one-out form needs the rest.
  whole.Answer();
  std::vector<float> expected(24);
  DamageReference(whole.Args(expected));

  // The same answer, of which only the first extent is in the lane.
  std::vector<float> near_logits;
  std::vector<float> rest_lse;
  std::vector<float> rest_output;
  for (size_t r = 0; r < 2; ++r) {
    const float* row = whole.logits.data() + r * 24;
    near_logits.insert(near_logits.end(), row, row + 12);
    double total = 0;
    std::vector<double> output(16, 0.0);
    for (size_t s = 12; s < 24; ++s) {
      total += std::exp(row[s]);
      for (size_t d = 0; d < 16; ++d) output[d] += std::exp(row[s]) * lane.value(s, d);
    }
    rest_lse.push_back(static_cast<float>(std::log(total)));
    for (const double x : output) rest_output.push_back(static_cast<float>(x / total));
  }
  std::vector<float> damage(12);
  DamageArgs args = whole.Args(damage);
  args.extents = std::span(lane.extents()).first(1);
  args.logits = near_logits;
  args.rest_lse = rest_lse;
  args.rest_output = rest_output;
  Run(args);

  for (size_t s = 0; s < 12; ++s) EXPECT_NEAR(damage[s], expected[s], 2e-6 * expected[s]) << s;
}

TEST_P(DamageTest, FastDamageFollowsItsFormulaAndStaysFinite) {
  const SampleLane lane({.dtype = GetParam().dtype, .head_dim = 16, .slots = 10}, random_);
  Question question(lane, 1, 1.0, random_);
  question.logits[4] = 300.0F;
  question.Answer();
  std::vector<float> damage(10);

  implementation_.Choose(FastDamageReference, FastDamageCpu,
                         FastDamageOnCuda)(question.Args(damage));

  for (size_t s = 0; s < 10; ++s) {
    const double a = std::exp(static_cast<double>(question.logits[s]) - question.lse[0]);
    double distance = 0;
    for (size_t d = 0; d < 16; ++d) {
      distance += std::pow(question.output[d] - lane.value(s, d), 2.0);
    }
    const double expected = a / std::max(1 - a, 0x1p-24) * std::sqrt(distance);
    EXPECT_NEAR(damage[s], expected, 1e-5 * expected + 1e-37) << s;  // 1e-37: f32 ends there.
    EXPECT_TRUE(std::isfinite(damage[s]));
  }
}

TEST_P(DamageTest, WeightedValueIsTheSumOfValues) {
  const SampleLane lane({.dtype = GetParam().dtype,
                         .head_dim = 20,
                         .slots = 45,
                         .extent_slots = 8,
                         .empty_one_in = 4,
                         .poison_empty = true},
                        random_);
  std::uniform_real_distribution<float> uniform;
  std::vector<float> weight(2 * lane.slots());
  for (size_t i = 0; i < weight.size(); ++i) {
    weight[i] = lane.is_empty(i % lane.slots()) ? 0.0F : uniform(random_);
  }
  std::vector<float> output(2 * lane.dim(), 99.0F);

  implementation_.Choose(WeightedValueReference, WeightedValueCpu,
                         WeightedValueOnCuda)({.dtype = GetParam().dtype,
                                               .head_dim = 20,
                                               .rows = 2,
                                               .extents = lane.extents(),
                                               .weight = weight,
                                               .output = output});

  for (size_t r = 0; r < 2; ++r) {
    for (size_t d = 0; d < lane.dim(); ++d) {
      double sum = 0;
      double magnitude = 0;
      for (size_t s = 0; s < lane.slots(); ++s) {
        if (lane.is_empty(s)) continue;
        const double term = static_cast<double>(weight[r * lane.slots() + s]) * lane.value(s, d);
        sum += term;
        magnitude += std::fabs(term);
      }
      EXPECT_NEAR(output[r * lane.dim() + d], sum, 1e-6 * magnitude);
    }
  }
}

// Sizes that fill tiles and vectors in every way, and rows that do or do not have a dominant token.
TEST_P(DamageTest, EveryTargetAgreesWithTheReferenceOnLongLanes) {
  for (const int head_dim : {8, 64, 77, 128}) {
    for (const int rows : {1, 3, 15}) {
      const SampleLane lane({.dtype = GetParam().dtype,
                             .head_dim = head_dim,
                             .slots = 300,
                             .extent_slots = 32,
                             .empty_one_in = 7,
                             .poison_empty = true},
                            random_);
      const Question question(lane, rows, rows == 3 ? 8.0 : 1.0, random_);
      std::vector<float> exact(lane.slots());
      std::vector<float> fast(lane.slots());
      std::vector<float> tested_fast(lane.slots());
      DamageReference(question.Args(exact));
      FastDamageReference(question.Args(fast));

      const std::vector<float> tested = Damage(question);
      implementation_.Choose(FastDamageReference, FastDamageCpu,
                             FastDamageOnCuda)(question.Args(tested_fast));

      for (size_t s = 0; s < lane.slots(); ++s) {
        EXPECT_NEAR(tested[s], exact[s], 1e-5 * exact[s] + 1e-30) << s;
        EXPECT_NEAR(tested_fast[s], fast[s], 1e-5 * fast[s] + 1e-30) << s;
      }
    }
  }
}

TEST_P(DamageTest, KeysAreNeverTouched) {
  const SampleLane lane({.dtype = GetParam().dtype, .head_dim = 16, .slots = 40}, random_);
  const Question question(lane, 2, 8.0, random_);
  const ForbiddenMemory forbidden;
  std::vector<Extent> extents = lane.extents();
  for (Extent& extent : extents) extent.key = forbidden.bytes();
  std::vector<float> damage(lane.slots()), fast(lane.slots()), expected(lane.slots());
  std::vector<float> output(2 * lane.dim());

  DamageArgs args = question.Args(damage);
  args.extents = extents;
  Run(args);
  args.damage = fast;
  implementation_.Choose(FastDamageReference, FastDamageCpu, FastDamageOnCuda)(args);
  implementation_.Choose(WeightedValueReference, WeightedValueCpu,
                         WeightedValueOnCuda)({.dtype = GetParam().dtype,
                                               .head_dim = 16,
                                               .rows = 2,
                                               .extents = extents,
                                               .weight = question.logits,
                                               .output = output});

  EXPECT_EQ(damage, Damage(question));
  FastDamageReference(question.Args(expected));
  for (size_t s = 0; s < lane.slots(); ++s) EXPECT_NEAR(fast[s], expected[s], 1e-5 * expected[s]);
}

TEST_P(DamageTest, RowThatSawNothingAddsNothing) {
  const SampleLane lane({.dtype = GetParam().dtype, .head_dim = 16, .slots = 40}, random_);
  Question both(lane, 2, 1.0, random_);
  std::fill(both.logits.begin() + 40, both.logits.end(), kMinusInfinity);
  both.lse[1] = kMinusInfinity;
  std::fill(both.output.begin() + 16, both.output.end(), 0.0F);
  const std::vector<float> damage = Damage(both);
  both.rows = 1;
  both.logits.resize(40);
  both.lse.resize(1);
  both.output.resize(16);

  EXPECT_EQ(damage, Damage(both));
}

INSTANTIATE_TEST_SUITE_P(Every, DamageTest, testing::ValuesIn(EveryImplementationAndCuda()),
                         ImplementationCaseName);

}  // namespace
}  // namespace ebbtide::gpu
