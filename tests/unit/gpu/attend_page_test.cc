// SPDX-License-Identifier: Apache-2.0
//
// Logits, lse and outputs are within attend's bounds of what long double finds; spreads are never
// below what it finds for the same logits and outputs, and little above; for every implementation.

#include "gpu/kernels/attend_page.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/kernels/attend.h"
#include "tests/support/random_seed.h"
#include "tests/unit/gpu/each_target.h"

namespace ebbtide::gpu {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();

struct Sample {
  int rows = 0;
  int tokens = 0;
  int head_dim = 0;
  float scale = 0.25F;
  std::vector<float> query = {};
  std::vector<float> page = {};
  std::vector<uint64_t> visible = {};

  size_t dim() const { return static_cast<size_t>(head_dim); }
  const float* value(size_t t) const { return &page[(static_cast<size_t>(tokens) + t) * dim()]; }
  bool sees(size_t row, size_t t) const { return (visible[row] >> t & 1) != 0; }
  long double Logit(size_t row, size_t t) const {
    long double sum = 0;
    for (size_t d = 0; d < dim(); ++d)
      sum += static_cast<long double>(query[row * dim() + d]) * page[t * dim() + d];
    return sum * scale;
  }
  // Of token `t`'s value, squared.
  long double Distance(size_t t, const float* from) const {
    long double sum = 0;
    for (size_t d = 0; d < dim(); ++d) {
      const long double off = static_cast<long double>(value(t)[d]) - from[d];
      sum += off * off;
    }
    return sum;
  }
};

long double Length(const float* x, size_t count) {
  long double squares = 0;
  for (size_t d = 0; d < count; ++d) squares += static_cast<long double>(x[d]) * x[d];
  return std::sqrt(squares);
}

// Rows flat, peaked, all but one token hidden, and all hidden, over values of `size`; rows enough
// for every number that a kernel takes at once.
Sample Draw(int tokens, int head_dim, double size, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  Sample sample{.rows = 7, .tokens = tokens, .head_dim = head_dim};
  for (int i = 0; i < 2 * tokens * head_dim; ++i) {
    const double unit = i < tokens * head_dim ? 1 : size;
    sample.page.push_back(static_cast<float>(unit * normal(random)));
  }
  const uint64_t all = tokens == 64 ? ~uint64_t{0} : (uint64_t{1} << tokens) - 1;
  for (int row = 0; row < sample.rows; ++row) {
    const double length = row == 0 ? 0 : row == 1 ? 1 : 40;
    for (int d = 0; d < head_dim; ++d)
      sample.query.push_back(static_cast<float>(length * normal(random) / std::sqrt(head_dim)));
    sample.visible.push_back(row == 4   ? 0
                             : row == 3 ? uint64_t{1} << (tokens / 2)
                             : row == 5 ? all & random()
                                        : all);
  }
  sample.visible[5] |= 1;
  return sample;
}

class AttendPageTest : public OnReferenceAndTarget {
 protected:
  struct Result {
    std::vector<float> output;
    std::vector<float> lse;
    std::vector<float> focal_output;
    std::vector<Spread> spread;
    std::vector<float> logits;
  };
  Result Run(const Sample& sample) {
    const auto rows = static_cast<size_t>(sample.rows);
    const float nan = std::nanf("");
    Result result{std::vector<float>(rows * sample.dim(), nan), std::vector<float>(rows, nan),
                  std::vector<float>(rows * sample.dim(), nan), std::vector<Spread>(rows),
                  std::vector<float>(rows * static_cast<size_t>(sample.tokens), nan)};
    Choose(&AttendPageReference, &AttendPageCpu,
           &AttendPageOnCuda)({.rows = sample.rows,
                               .tokens = sample.tokens,
                               .head_dim = sample.head_dim,
                               .scale = sample.scale,
                               .query = sample.query,
                               .page = sample.page,
                               .visible = sample.visible,
                               .output = result.output,
                               .lse = result.lse,
                               .focal_output = result.focal_output,
                               .spread = result.spread,
                               .logits = result.logits});
    return result;
  }
  static void CheckRow(const Sample& sample, const Result& result, size_t row);
};
INSTANTIATE_TEST_SUITE_P(Every, AttendPageTest, ReferenceTargetsAndCuda(), TargetName);

// `below`: what shares below the normal range may cost.
void ExpectJustAbove(double found, long double exact, long double below = 0) {
  ASSERT_GE(found, exact - below);
  ASSERT_LE(found, exact * (1 + 1.5e-4L) + 1.1e-20L);
}

// Of the logits as they are stored.
std::vector<long double> SharesOf(const Sample& sample, const float* logits) {
  std::vector<long double> share;
  long double total = 0;
  const float peak = *std::max_element(logits, logits + sample.tokens);
  for (int t = 0; t < sample.tokens; ++t)
    total += share.emplace_back(std::exp(static_cast<long double>(logits[t]) - peak));
  for (long double& each : share) each /= total;
  return share;
}

void AttendPageTest::CheckRow(const Sample& sample, const Result& result, size_t row) {
  const size_t dim = sample.dim();
  const float* const logits = &result.logits[row * static_cast<size_t>(sample.tokens)];
  const std::vector<long double> share = SharesOf(sample, logits);
  const float* const output = &result.output[row * dim];
  const float* const focal_output = &result.focal_output[row * dim];
  const std::vector<float> origin(dim);
  std::vector<long double> mean(dim);
  std::vector<long double> focal_mean(dim);
  long double mass = 0;
  long double focus = 0;
  long double each = 0;
  long double focal = 0;
  long double longest = 0;
  const long double query_norm = Length(&sample.query[row * dim], dim);
  for (size_t t = 0; t < share.size(); ++t) {
    if (!sample.sees(row, t)) {
      ASSERT_EQ(logits[t], kHidden);
      continue;
    }
    const auto key_norm = static_cast<float>(Length(&sample.page[t * dim], dim) * 1.0001L);
    ASSERT_NEAR(static_cast<double>(logits[t] - sample.Logit(row, t)), 0,
                AttendLogitError(sample.head_dim, sample.scale,
                                 static_cast<float>(query_norm * 1.0001L), key_norm));
    mass += std::exp(static_cast<long double>(logits[t]));
    focus += share[t] * share[t];
    each += share[t] * sample.Distance(t, output);
    focal += share[t] * share[t] * sample.Distance(t, focal_output);
    longest = std::max(longest, std::sqrt(sample.Distance(t, origin.data())));
    for (size_t d = 0; d < dim; ++d) {
      mean[d] += share[t] * sample.value(t)[d];
      focal_mean[d] += share[t] * share[t] * sample.value(t)[d];
    }
  }
  const double sum_error = AttendSumError(static_cast<size_t>(sample.tokens));
  const auto lse = static_cast<double>(std::log(mass));
  ASSERT_NEAR(result.lse[row], lse, sum_error + 1e-7 * (1 + std::fabs(lse)));
  long double off = 0;
  long double focal_off = 0;
  for (size_t d = 0; d < dim; ++d) {
    off += (mean[d] - output[d]) * (mean[d] - output[d]);
    const long double focal_each = focal_mean[d] / focus - focal_output[d];
    focal_off += focal_each * focal_each;
  }
  ASSERT_LE(std::sqrt(off), sum_error * longest);
  ASSERT_LE(std::sqrt(focal_off), kFocalOutputError * longest);
  ExpectJustAbove(result.spread[row].focus, focus);
  ExpectJustAbove(result.spread[row].each, std::sqrt(each), 1e-18L * longest);
  ExpectJustAbove(result.spread[row].focal, std::sqrt(focal), 1e-18L * longest);
}

TEST_P(AttendPageTest, AnswersAreWithinAttendsBoundsAndSpreadsJustAboveTheExactOnes) {
  test::ForEachSeed(1, [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (const int tokens : {1, 7, 32, 64}) {
      for (const int head_dim : {1, 7, 64, 77, 128, 256}) {
        for (const double size : {1.0, 1e-7, 6e4}) {
          const Sample sample = Draw(tokens, head_dim, size, random);

          const Result result = Run(sample);

          for (const size_t row : {0, 1, 2, 3, 5, 6})
            ASSERT_NO_FATAL_FAILURE(CheckRow(sample, result, row));
        }
      }
    }
  });
}

TEST_P(AttendPageTest, RowThatSeesNothingHasNoAnswerAndNoSpread) {
  std::mt19937_64 random(1);
  const Sample sample = Draw(32, 64, 1, random);

  const Result result = Run(sample);

  const std::vector<float> zeros(64);
  const auto row_of = [](const std::vector<float>& rows) {
    return std::vector<float>(rows.begin() + 4 * 64, rows.begin() + 5 * 64);
  };
  EXPECT_EQ(result.lse[4], kHidden);
  EXPECT_EQ(row_of(result.output), zeros);
  EXPECT_EQ(row_of(result.focal_output), zeros);
  EXPECT_EQ(result.spread[4].each, 0);
  EXPECT_EQ(result.spread[4].focus, 1);
  EXPECT_EQ(result.spread[4].focal, 0);
}

TEST_P(AttendPageTest, OneTokenAloneHasAllTheFocusAndNoSpreadAroundItself) {
  std::mt19937_64 random(2);
  const Sample sample = Draw(32, 64, 1, random);  // Row 3 sees token 16 alone.

  const Result result = Run(sample);

  EXPECT_NEAR(result.spread[3].focus, 1, 2e-4);
  EXPECT_LE(result.spread[3].focal, 1e-5);
  for (size_t d = 0; d < 64; ++d)
    EXPECT_NEAR(result.focal_output[3 * 64 + d], sample.value(16)[d], 1e-6);
}

TEST_P(AttendPageTest, SpanOfTheWrongSizeStopsTheProcess) {
  std::mt19937_64 random(3);
  Sample sample = Draw(4, 8, 1, random);
  sample.page.pop_back();

  EXPECT_DEATH(Run(sample), "page is \\[K tokens x d\\]\\[V tokens x d\\]");
}

}  // namespace
}  // namespace ebbtide::gpu
