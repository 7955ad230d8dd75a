// SPDX-License-Identifier: Apache-2.0
//
// Spreads are never below what long double finds for the same outputs, and little above; for every
// implementation.

#include "gpu/kernels/spread.h"

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

constexpr float kHidden = -std::numeric_limits<float>::infinity();

struct Sample {
  int rows = 0;
  int tokens = 0;
  int head_dim = 0;
  std::vector<float> value = {};
  std::vector<float> logits = {};
  std::vector<float> lse = {};
  std::vector<float> output = {};

  std::vector<long double> SharesOf(size_t row) const {
    std::vector<long double> share;
    long double total = 0;
    for (size_t t = 0; t < static_cast<size_t>(tokens); ++t) {
      const long double logit = logits[row * static_cast<size_t>(tokens) + t];
      total += share.emplace_back(std::exp(logit - static_cast<long double>(lse[row])));
    }
    for (long double& each : share) each /= total;
    return share;
  }
  // Of token `t`, squared.
  long double Distance(size_t t, const float* from) const {
    long double sum = 0;
    for (size_t d = 0; d < static_cast<size_t>(head_dim); ++d) {
      const long double off =
          static_cast<long double>(value[t * static_cast<size_t>(head_dim) + d]) - from[d];
      sum += off * off;
    }
    return sum;
  }
};

// Rows flat, peaked, all but one hidden, and all hidden, around values of `size`.
Sample Draw(int tokens, int head_dim, double size, std::mt19937_64& random) {
  std::normal_distribution<double> normal;
  Sample sample{.rows = 5, .tokens = tokens, .head_dim = head_dim};
  for (int i = 0; i < tokens * head_dim; ++i)
    sample.value.push_back(static_cast<float>(size * normal(random)));
  for (int row = 0; row < sample.rows; ++row) {
    double mass = 0;
    for (int t = 0; t < tokens; ++t) {
      const bool is_hidden = row == 4 || (row == 3 && t != tokens / 2);
      const double spread = row == 0 ? 0 : row == 1 ? 1 : 12;
      const auto logit = static_cast<float>(-7 + spread * normal(random));
      sample.logits.push_back(is_hidden ? kHidden : logit);
      mass += std::exp(static_cast<double>(sample.logits.back()));
    }
    sample.lse.push_back(static_cast<float>(std::log(mass)));
    for (int d = 0; d < head_dim; ++d)
      sample.output.push_back(static_cast<float>(size * normal(random)));
  }
  return sample;
}

class SpreadTest : public OnReferenceAndTarget {
 protected:
  struct Result {
    std::vector<float> focal_output;
    std::vector<Spread> spread;
  };
  Result Run(const Sample& sample) {
    Result result{std::vector<float>(sample.output.size(), std::nanf("")),
                  std::vector<Spread>(static_cast<size_t>(sample.rows))};
    Choose(&SpreadReference, &SpreadCpu)({.rows = sample.rows,
                                          .tokens = sample.tokens,
                                          .head_dim = sample.head_dim,
                                          .value = sample.value,
                                          .logits = sample.logits,
                                          .lse = sample.lse,
                                          .output = sample.output,
                                          .focal_output = result.focal_output,
                                          .spread = result.spread});
    return result;
  }
};
INSTANTIATE_TEST_SUITE_P(Every, SpreadTest, ReferenceAndEveryTarget(), TargetName);

void ExpectJustAbove(double found, long double exact) {
  ASSERT_GE(found, exact);
  ASSERT_LE(found, exact * (1 + 1.5e-4L) + 1.1e-20L);
}

void CheckRow(const Sample& sample, size_t row, const float* focal, const Spread& spread) {
  const std::vector<long double> share = sample.SharesOf(row);
  const auto dim = static_cast<size_t>(sample.head_dim);
  std::vector<long double> mean(dim);
  const std::vector<float> origin(dim);
  long double focus = 0;
  long double each = 0;
  long double focal_spread = 0;
  long double longest = 0;
  for (size_t t = 0; t < share.size(); ++t) {
    const long double square = share[t] * share[t];
    focus += square;
    each += share[t] * sample.Distance(t, &sample.output[row * dim]);
    focal_spread += square * sample.Distance(t, focal);
    longest = std::max(longest, sample.Distance(t, origin.data()));
    for (size_t d = 0; d < dim; ++d) mean[d] += square * sample.value[t * dim + d];
  }
  long double off = 0;
  for (size_t d = 0; d < dim; ++d) {
    off += (mean[d] / focus - focal[d]) * (mean[d] / focus - focal[d]);
  }
  ASSERT_LE(std::sqrt(off), kFocalOutputError * std::sqrt(longest));
  ExpectJustAbove(spread.focus, focus);
  ExpectJustAbove(spread.each, std::sqrt(each));
  ExpectJustAbove(spread.focal, std::sqrt(focal_spread));
}

TEST_P(SpreadTest, SpreadsAreNeverBelowTheExactOnesAndLittleAbove) {
  test::ForEachSeed(1, [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (const int tokens : {1, 7, 32, 64}) {
      for (const int head_dim : {1, 7, 64, 77, 128, 256}) {
        for (const double size : {1.0, 1e-7, 6e4}) {
          const Sample sample = Draw(tokens, head_dim, size, random);

          const Result result = Run(sample);

          for (size_t row = 0; row < 4; ++row) {
            ASSERT_NO_FATAL_FAILURE(
                CheckRow(sample, row, &result.focal_output[row * static_cast<size_t>(head_dim)],
                         result.spread[row]));
          }
        }
      }
    }
  });
}

TEST_P(SpreadTest, RowThatSeesNothingHasNoSpread) {
  std::mt19937_64 random(1);
  const Sample sample = Draw(32, 64, 1, random);

  const Result result = Run(sample);

  EXPECT_EQ(result.spread[4].each, 0);
  EXPECT_EQ(result.spread[4].focus, 1);
  EXPECT_EQ(result.spread[4].focal, 0);
  EXPECT_EQ(std::vector<float>(result.focal_output.end() - 64, result.focal_output.end()),
            std::vector<float>(64));
}

TEST_P(SpreadTest, OneTokenAloneHasAllTheFocusAndNoSpreadAroundItself) {
  std::mt19937_64 random(2);
  const Sample sample = Draw(32, 64, 1, random);  // Row 3 sees token 16 alone.

  const Result result = Run(sample);

  EXPECT_NEAR(result.spread[3].focus, 1, 2e-4);
  EXPECT_LE(result.spread[3].focal, 1e-5);
  for (size_t d = 0; d < 64; ++d)
    EXPECT_NEAR(result.focal_output[3 * 64 + d], sample.value[16 * 64 + d], 1e-6);
}

TEST_P(SpreadTest, SpanOfTheWrongSizeStopsTheProcess) {
  std::mt19937_64 random(3);
  Sample sample = Draw(4, 8, 1, random);
  sample.value.pop_back();

  EXPECT_DEATH(Run(sample), "value is \\[tokens, head_dim\\]");
}

}  // namespace
}  // namespace ebbtide::gpu
