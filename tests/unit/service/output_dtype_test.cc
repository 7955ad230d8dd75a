// SPDX-License-Identifier: Apache-2.0
//
// Answers in a dtype that cannot hold every output: what is beyond its range is never met, and what
// its rounding does is in the bound.

#include <cmath>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/element.h"
#include "service/engine.h"
#include "tests/support/engine_stand.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::service {
namespace {

using test::EngineStand;

constexpr int kTokens = 40;
constexpr int kHeadDim = 16;
constexpr float kHalfMax = 65504;

// One lane of f32 tokens with one value in every channel, so that it is every token's output.
class OutputDtypeTest : public testing::TestWithParam<const char*> {
 protected:
  // The last of so many calls.
  StepAnswer Answer(float value, gpu::Dtype output_dtype, int calls = 1) {
    const Geometry geometry{.layers = 1,
                            .query_heads = 1,
                            .kv_heads = 1,
                            .head_dim = kHeadDim,
                            .dtype = gpu::Dtype::kF32,
                            .scale = 0.25F,
                            .page_tokens = 16};
    Engine& engine = stand_.engine();
    EXPECT_OK(engine.RegisterModel("m", geometry, "weights").status());
    EXPECT_OK(engine
                  .OpenSequence({.sequence = "a",
                                 .model = "m",
                                 .policy = "streaming",
                                 .recall = GetParam(),
                                 .budget_tokens = 64,
                                 .chunk_tokens = kTokens})
                  .status());
    const int64_t shape[] = {kTokens, 1, kHeadDim};
    const std::vector<float> zeros(size_t{kTokens} * kHeadDim);
    const std::vector<float> values(zeros.size(), value);
    StepItem item{.sequence = "a",
                  .q = TensorView{gpu::Dtype::kF32, shape, std::as_bytes(std::span(zeros))},
                  .k = TensorView{gpu::Dtype::kF32, shape, std::as_bytes(std::span(zeros))},
                  .v = TensorView{gpu::Dtype::kF32, shape, std::as_bytes(std::span(values))},
                  .output_dtype = output_dtype};
    StepAnswer answer;
    for (int call = 0; call < calls; ++call) {
      item.first_index = static_cast<uint64_t>(call) * kTokens;
      answer = engine.Step({.phase = Phase::kDecode}, {&item, 1}).front();
      EXPECT_OK(answer.status);
      stand_.Settle();
    }
    return answer;
  }

  static float LastOutput(const StepAnswer& answer, gpu::Dtype dtype) {
    const size_t row = kHeadDim * gpu::DtypeBytes(dtype);
    return gpu::ElementAt(dtype, answer.output.data() + (kTokens - 1) * row, 0);
  }

  EngineStand stand_;
};

TEST_P(OutputDtypeTest, OutputBeyondItsRangeIsNotMet) {
  const StepAnswer answer = Answer(1e5F, gpu::Dtype::kF16);

  EXPECT_TRUE(std::isinf(LastOutput(answer, gpu::Dtype::kF16)));
  EXPECT_TRUE(std::isinf(answer.certificate.error_bound.back()));
  EXPECT_EQ(answer.certificate.met, std::vector<uint8_t>(kTokens, 0));
  EXPECT_EQ(answer.certificate.not_met_reason, "ARITHMETIC");
}

TEST_P(OutputDtypeTest, RoundingOfTheLargestThatFitsIsInTheBound) {
  const StepAnswer answer = Answer(kHalfMax - 3, gpu::Dtype::kF16);

  EXPECT_EQ(LastOutput(answer, gpu::Dtype::kF16), kHalfMax);
  EXPECT_GE(answer.certificate.error_bound.back(), 3 * std::sqrt(kHeadDim));
  EXPECT_LT(answer.certificate.error_bound.back(), 100);
  EXPECT_EQ(answer.certificate.met, std::vector<uint8_t>(kTokens, 1));
  EXPECT_EQ(answer.certificate.not_met_reason, "");
}

// Every value that a call may bring is within bf16's range.
TEST_P(OutputDtypeTest, TheLargestValueIsAnAnswerInBfloat16) {
  const float largest = 0x1p48F;

  const StepAnswer answer = Answer(largest, gpu::Dtype::kBF16);

  EXPECT_EQ(LastOutput(answer, gpu::Dtype::kBF16), largest);
  EXPECT_TRUE(std::isfinite(answer.certificate.error_bound.back()));
  EXPECT_EQ(answer.certificate.met, std::vector<uint8_t>(kTokens, 1));
}

using RoundedTargetTest = OutputDtypeTest;

// Reading helps no such target: it is aimed at as if the output were exact.
TEST_P(RoundedTargetTest, NothingIsReadForWhatOnlyRoundingTakes) {
  constexpr int kCalls = 5;

  const StepAnswer rounded = Answer(1 + 0x1p-8F, gpu::Dtype::kBF16, kCalls);
  ASSERT_OK(stand_.engine().CloseSequence("a"));
  const StepAnswer exact = Answer(1 + 0x1p-8F, gpu::Dtype::kF32, kCalls);

  EXPECT_GT(exact.absent_pages, 0U);
  EXPECT_EQ(exact.certificate.met.back(), 1);
  EXPECT_THAT(exact.touched, testing::IsEmpty());
  EXPECT_EQ(rounded.certificate.met.back(), 0);
  EXPECT_THAT(rounded.touched, testing::IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(EveryRecall, RoundedTargetTest,
                         testing::Values("bounded(0.001)", "estimated(0.001)"),
                         [](const auto& test) {
                           const std::string recall = test.param;
                           return recall.substr(0, recall.find('('));
                         });
INSTANTIATE_TEST_SUITE_P(EveryRecall, OutputDtypeTest,
                         testing::Values("exact", "off", "bounded(0.02)", "estimated(0.02)"),
                         [](const auto& test) {
                           const std::string recall = test.param;
                           return recall.substr(0, recall.find('('));
                         });

}  // namespace
}  // namespace ebbtide::service
