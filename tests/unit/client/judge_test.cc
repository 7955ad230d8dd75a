// SPDX-License-Identifier: Apache-2.0
//
// Verdicts on answers whose truth is a handful of round numbers.

#include "client/cli/judge.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/status_matchers.h"

namespace ebbtide::cli {
namespace {

using test::StatusIs;

// Two tokens, two heads, two channels.
LayerTruth TwoTokens() {
  return {.query_heads = 2,
          .head_dim = 2,
          .output = {3, 4, 0, 1, 1, 0, 0, 2},
          .lse = {1, 2, 3, 4},
          .logit_slack = {0, 0, 0, 0}};
}

void SetOutput(const std::vector<float>& output, client::AttendResult& result) {
  result.output.dtype = client::Dtype::kF32;
  result.output.bytes.resize(output.size() * sizeof(float));
  std::memcpy(result.output.bytes.data(), output.data(), result.output.bytes.size());
}

// The answer to token 0 that equals the truth.
client::AttendResult Exact() {
  client::AttendResult result;
  SetOutput({3, 4, 0, 1}, result);
  result.lse = {1, 2};
  result.certificate = {.mass_bound = {0, 0}, .error_bound = {0, 0}, .met = {true}};
  return result;
}

TokenVerdict JudgeOne(const client::AttendResult& result) {
  const absl::StatusOr<std::vector<TokenVerdict>> verdicts = Judge(TwoTokens(), 0, 1, result);
  EXPECT_OK(verdicts);
  return verdicts->front();
}

TEST(JudgeTest, TheTruthHasNoErrorAndNoViolation) {
  const TokenVerdict verdict = JudgeOne(Exact());

  EXPECT_EQ(verdict.rel_error, 0);
  EXPECT_EQ(verdict.error_violations, 0U);
  EXPECT_EQ(verdict.mass_violations, 0U);
  EXPECT_TRUE(verdict.bound_over_error.empty());
}

TEST(JudgeTest, ErrorsAreRelativeToAllHeadsAndToTheWorst) {
  client::AttendResult result = Exact();
  SetOutput({3, 4, 0, 0.5F}, result);  // 0.5 off, of sizes 5 and 1.
  result.certificate.error_bound = {0, 1};

  const TokenVerdict verdict = JudgeOne(result);

  EXPECT_DOUBLE_EQ(verdict.rel_error, 0.5 / std::sqrt(26.0));
  EXPECT_DOUBLE_EQ(verdict.certified_rel_error, 1 / std::sqrt(26.0));
  EXPECT_DOUBLE_EQ(verdict.worst_head_rel_error, 0.5);
  EXPECT_EQ(verdict.error_violations, 0U);
  EXPECT_THAT(verdict.bound_over_error, testing::ElementsAre(2.0));
}

TEST(JudgeTest, AnErrorAboveItsBoundByTheLeastBitIsAViolation) {
  client::AttendResult result = Exact();
  SetOutput({3, 4, 0, 0.5F}, result);
  result.certificate.error_bound = {0, std::nextafter(0.5F, 0.0F)};

  EXPECT_EQ(JudgeOne(result).error_violations, 1U);

  result.certificate.error_bound[1] = 0.5F;
  EXPECT_EQ(JudgeOne(result).error_violations, 0U);
}

TEST(JudgeTest, NaNIsAViolationAndTheWorstError) {
  client::AttendResult result = Exact();
  SetOutput({NAN, 4, 0, 1}, result);
  result.certificate.error_bound = {1, 1};

  const TokenVerdict verdict = JudgeOne(result);

  EXPECT_EQ(verdict.error_violations, 1U);
  EXPECT_EQ(verdict.rel_error, std::numeric_limits<double>::infinity());

  result = Exact();
  result.certificate.error_bound = {NAN, 0};
  EXPECT_EQ(JudgeOne(result).error_violations, 1U);
}

TEST(JudgeTest, MassThatTheLseProvesToBeMissingMustBeCertified) {
  client::AttendResult result = Exact();
  result.lse[0] = 1 + std::log(0.75F);  // A quarter of the mass was left out.
  result.certificate.mass_bound = {0.24F, 0};

  EXPECT_EQ(JudgeOne(result).mass_violations, 1U);

  result.touched = {{.rung = "coarse", .tier = client::Tier::kHost, .pages = 1, .bytes = 9}};
  EXPECT_EQ(JudgeOne(result).mass_violations, 0U);  // The lse is no proof then.

  result.touched = {};
  result.certificate.mass_bound[0] = 0.26F;
  EXPECT_EQ(JudgeOne(result).mass_violations, 0U);
}

TEST(JudgeTest, RoundingOfTheLseIsNoMissingMass) {
  client::AttendResult result = Exact();
  result.lse[1] = std::nextafter(2.0F, 0.0F);

  EXPECT_EQ(JudgeOne(result).mass_violations, 0U);
}

TEST(JudgeTest, TokensAreHeldAgainstTheirOwnTruth) {
  client::AttendResult result;
  SetOutput({1, 0, 0, 2}, result);  // Token 1.
  result.lse = {3, 4};
  result.certificate = {.mass_bound = {0, 0}, .error_bound = {0, 0}, .met = {true}};

  ASSERT_OK_AND_ASSIGN(const std::vector<TokenVerdict> verdicts, Judge(TwoTokens(), 1, 1, result));

  EXPECT_EQ(verdicts.front().rel_error, 0);
}

TEST(JudgeTest, AnAnswerOfTheWrongSizeIsRefused) {
  client::AttendResult result = Exact();
  result.lse.pop_back();

  EXPECT_THAT(Judge(TwoTokens(), 0, 1, result), StatusIs(absl::StatusCode::kInternal));

  result = Exact();
  result.output.dtype = client::Dtype::kF16;
  EXPECT_THAT(Judge(TwoTokens(), 0, 1, result), StatusIs(absl::StatusCode::kInternal));
}

TEST(SummariseTest, RanksAreNumbersThatOccurred) {
  std::vector<double> numbers;
  for (int i = 100; i >= 1; --i) numbers.push_back(i);

  const Summary summary = Summarise(numbers);

  EXPECT_EQ(summary.mean, 50.5);
  EXPECT_EQ(summary.p50, 50);
  EXPECT_EQ(summary.p99, 99);
  EXPECT_EQ(summary.max, 100);
  EXPECT_EQ(summary.count, 100U);
}

TEST(SummariseTest, OfOneNumberEverythingIsThatNumber) {
  const Summary summary = Summarise({7});

  EXPECT_EQ(summary.p50, 7);
  EXPECT_EQ(summary.p99, 7);
  EXPECT_EQ(Summarise({}).count, 0U);
}

}  // namespace
}  // namespace ebbtide::cli
