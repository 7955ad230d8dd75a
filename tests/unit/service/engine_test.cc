// SPDX-License-Identifier: Apache-2.0
//
// The whole service on real tiers, without a wire: what a worker sees when it appends, attends,
// retries and reads back. Truth is full attention in float64.

#include "service/engine.h"

#include <cmath>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "service/reason.h"
#include "tests/support/engine_stand.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::service {
namespace {

using test::EngineStand;
using test::Errors;
using test::ErrorsOf;
using test::SmallGeometry;
using test::StatusIs;
using test::Tokens;
using test::Worker;
using testing::HasSubstr;

class EngineTest : public testing::Test {
 protected:
  // Prefills `prompt` tokens in chunks, then decodes up to `end`; checks every decode answer.
  void Run(Worker& worker, int32_t prompt, int32_t end, double* worst, int* violations) {
    ASSERT_OK(worker.Open().status());
    for (int32_t first = 0; first < prompt; first += 32) {
      const int32_t count = std::min(32, prompt - first);
      const StepAnswer answer =
          worker.StepAllLayers({.first = first, .count = count, .phase = Phase::kPrefill});
      ASSERT_OK(answer.status);
      *violations +=
          ErrorsOf(answer, tokens_, tokens_.geometry.layers - 1, first + count - 1, count)
              .violations;
    }
    for (int32_t index = prompt; index < end; ++index) {
      for (int layer = 0; layer < tokens_.geometry.layers; ++layer) {
        const StepAnswer answer = worker.Step({.layer = layer, .first = index});
        ASSERT_OK(answer.status);
        const Errors errors = ErrorsOf(answer, tokens_, layer, index, 1);
        ASSERT_FALSE(std::isnan(errors.relative));
        *worst = std::max(*worst, errors.relative);
        *violations += errors.violations;
      }
      engine_.engine().CheckInvariants();
    }
  }

  Tokens tokens_{.geometry = SmallGeometry()};
  EngineStand engine_;
};

TEST_F(EngineTest, ExactRecallAnswersAsFullAttentionDoes) {
  Worker worker(engine_.engine(), tokens_, "a");
  worker.open = {.policy = "streaming", .recall = "exact", .budget_tokens = 48, .chunk_tokens = 32};
  double worst = 0;
  int violations = 0;

  Run(worker, 128, 200, &worst, &violations);

  EXPECT_LT(worst, 1e-5);
  EXPECT_EQ(violations, 0);
}

// What an answer loses as it is rounded to what was asked for is part of its error, and with recall
// of everything the most of it.
TEST_F(EngineTest, AnswersOfAnyDtypeAreCertifiedTruly) {
  const std::map<gpu::Dtype, double> rounding = {
      {gpu::Dtype::kF32, 1e-5}, {gpu::Dtype::kF16, 0x1p-11}, {gpu::Dtype::kBF16, 0x1p-8}};
  for (const auto& [dtype, most] : rounding) {
    for (const std::string recall : {"exact", "bounded(0.02)", "off"}) {
      tokens_.output_dtype = dtype;
      const std::string name = std::string(gpu::DtypeName(dtype)) + " " + recall;
      Worker worker(engine_.engine(), tokens_, name);
      worker.open = {
          .policy = "streaming", .recall = recall, .budget_tokens = 48, .chunk_tokens = 32};
      double worst = 0;
      int violations = 0;

      Run(worker, 96, 130, &worst, &violations);

      EXPECT_EQ(violations, 0) << name;
      if (recall != "exact") continue;
      EXPECT_LE(worst, most) << name;
      if (dtype == gpu::Dtype::kF32) continue;
      EXPECT_GT(worst, most / 8) << name;
    }
  }
}

TEST_F(EngineTest, EveryByteComesBack) {
  Worker worker(engine_.engine(), tokens_, "a");
  worker.open = {.policy = "keydiff", .recall = "off", .budget_tokens = 48, .chunk_tokens = 32};
  double worst = 0;
  int violations = 0;
  Run(worker, 128, 205, &worst, &violations);
  engine_.Settle();

  for (uint32_t layer = 0; layer < 2; ++layer) {
    const std::vector<std::byte> keys = tokens_.Keys(static_cast<int>(layer), 0, 205);
    for (uint32_t head = 0; head < 2; ++head) {
      ASSERT_OK_AND_ASSIGN(
          const auto pages,
          engine_.engine().ReadPages({.sequence = "a", .layer = layer, .kv_head = head}));
      ASSERT_EQ(pages.size(), 13U);
      for (const PageBytes& page : pages) {
        ASSERT_EQ(page.state, PageAnswer::kOk);
        EXPECT_EQ(page.tier, page.first_index < 192 ? TierName::kHost : TierName::kDevice);
        for (uint32_t t = 0; t < page.tokens; ++t) {
          const size_t row = tokens_.geometry.page_shape().row_bytes();
          EXPECT_EQ(std::memcmp(page.k.data() + t * row,
                                keys.data() + ((page.first_index + t) * 2 + head) * row, row),
                    0);
        }
      }
    }
  }
}

TEST_F(EngineTest, BoundedRecallStaysWithinItsTarget) {
  for (const std::string policy :
       {"streaming", "keydiff", "h2o", "tova+caote", "snapkv+caote", "h2o+fastcaote"}) {
    Worker worker(engine_.engine(), tokens_, policy);
    worker.open = {
        .policy = policy, .recall = "bounded(0.02)", .budget_tokens = 48, .chunk_tokens = 32};
    double worst = 0;
    int violations = 0;

    Run(worker, 96, 140, &worst, &violations);

    EXPECT_LE(worst, 0.02) << policy;
    EXPECT_EQ(violations, 0) << policy;
  }
}

TEST_F(EngineTest, RecallOffIsCertifiedTruly) {
  Worker worker(engine_.engine(), tokens_, "a");
  worker.open = {.policy = "streaming", .recall = "off", .budget_tokens = 48, .chunk_tokens = 32};
  double worst = 0;
  int violations = 0;

  Run(worker, 128, 180, &worst, &violations);

  EXPECT_GT(worst, 0.02);  // Discarding costs: that is what recall is for.
  EXPECT_EQ(violations, 0);
}

TEST_F(EngineTest, WhatAnswersReadIsCounted) {
  Worker worker(engine_.engine(), tokens_, "a");
  worker.open = {.policy = "streaming", .recall = "exact", .budget_tokens = 48, .chunk_tokens = 32};
  double worst = 0;
  int violations = 0;
  Run(worker, 128, 140, &worst, &violations);
  engine_.Settle();
  const Stats before = engine_.engine().GetStats();

  const StepAnswer answer = worker.Step({.first = 140});

  uint64_t pages = 0;
  uint64_t bytes = 0;
  for (const TouchedRung& touched : answer.touched) {
    pages += touched.pages;
    bytes += touched.bytes;
  }
  EXPECT_EQ(pages, answer.absent_pages);
  EXPECT_GT(bytes, 0U);
  const Stats after = engine_.engine().GetStats();
  EXPECT_EQ(after.pages_recalled - before.pages_recalled, pages);
  EXPECT_EQ(after.bytes_recalled - before.bytes_recalled, bytes);
}

// Logits of 512 queries of 16 heads over 1,100 slots are too many to keep: they come in tiles.
TEST_F(EngineTest, PagesOfACallInTilesAreNamedOnce) {
  Geometry geometry = SmallGeometry();
  geometry.layers = 1;
  geometry.query_heads = 16;
  geometry.kv_heads = 1;
  const Tokens tokens{.geometry = geometry};
  EngineStand stand;
  Worker worker(stand.engine(), tokens, "a");
  worker.open = {.policy = "h2o", .recall = "exact", .budget_tokens = 64};
  ASSERT_OK(worker.Open().status());
  ASSERT_OK(worker.Step({.count = 512, .phase = Phase::kPrefill}).status);
  stand.Settle();

  const StepAnswer answer = worker.Step({.first = 512, .count = 512, .phase = Phase::kPrefill});

  ASSERT_OK(answer.status);
  EXPECT_GT(answer.absent_pages, 0U);
  EXPECT_LE(answer.absent_pages, 32U);  // Those of the first call.
  std::set<std::pair<std::string_view, TierName>> kinds;
  uint64_t pages = 0;
  for (const TouchedRung& touched : answer.touched) {
    EXPECT_TRUE(kinds.emplace(touched.rung, touched.tier).second);
    pages += touched.pages;
  }
  EXPECT_GT(pages, answer.absent_pages);  // Each tile read them.
}

TEST_F(EngineTest, PagesThatWouldNotFitAMessageOrTheTimeAreRefused) {
  Worker worker(engine_.engine(), tokens_, "a");
  worker.open = {.policy = "keydiff", .recall = "off", .budget_tokens = 48, .chunk_tokens = 40};
  ASSERT_OK(worker.Open().status());
  ASSERT_OK(worker.StepAllLayers({.first = 0, .count = 40, .phase = Phase::kPrefill}).status);

  EXPECT_OK(engine_.engine().ReadPages({.sequence = "a"}).status());
  EXPECT_THAT(engine_.engine().ReadPages({.sequence = "a", .answer_bytes_max = 4000}),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("ask for at most 1 pages")));
  EXPECT_THAT(engine_.engine().ReadPages({.sequence = "a", .deadline = absl::ZeroDuration()}),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("at page 0 of 0 to ")));
}

TEST_F(EngineTest, AnswersThatHadToBeMetSayWhetherAskingAgainHelps) {
  for (const std::string recall : {"off", "estimated(0.02)", "bounded(0.000001)"}) {
    Worker worker(engine_.engine(), tokens_, recall);
    worker.open = {
        .policy = "streaming", .recall = recall, .budget_tokens = 48, .chunk_tokens = 32};
    double worst = 0;
    int violations = 0;
    Run(worker, 128, 130, &worst, &violations);

    const StepAnswer answer = worker.Step({.first = 130, .require_met = true});

    EXPECT_EQ(answer.status.code(), absl::StatusCode::kFailedPrecondition) << answer.status;
    EXPECT_EQ(ReasonOf(answer.status), "NOT_MET");
    EXPECT_THAT(std::string(answer.status.message()), HasSubstr("asking again will not help"));
    EXPECT_EQ(answer.length, 131U);  // They stay appended.
  }
}

TEST_F(EngineTest, RepeatedCallIsReplayedAndChangesNothing) {
  Worker worker(engine_.engine(), tokens_, "a");
  worker.open = {.policy = "h2o", .recall = "exact", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(worker.Open().status());
  ASSERT_OK(worker.StepAllLayers({.first = 0, .count = 32, .phase = Phase::kPrefill}).status);
  const StepAnswer first = worker.Step({.layer = 0, .first = 32});
  ASSERT_OK(first.status);

  const StepAnswer again = worker.Step({.layer = 0, .first = 32});

  ASSERT_OK(again.status);
  EXPECT_FALSE(first.replayed);
  EXPECT_TRUE(again.replayed);
  EXPECT_EQ(again.output, first.output);
  EXPECT_EQ(again.length, 33U);
  EXPECT_EQ(again.committed, 32U);
}

TEST_F(EngineTest, TokensThatSkipOrRepeatIndicesAreRefusedWithBothLengths) {
  Worker worker(engine_.engine(), tokens_, "a");
  worker.open = {.policy = "streaming", .recall = "off", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(worker.Open().status());
  ASSERT_OK(worker.StepAllLayers({.first = 0, .count = 32, .phase = Phase::kPrefill}).status);

  const StepAnswer gap = worker.Step({.layer = 0, .first = 40});
  const StepAnswer overlap = worker.Step({.layer = 0, .first = 20, .count = 4});

  EXPECT_EQ(gap.status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(gap.status), "INDEX_GAP");
  EXPECT_EQ(gap.length, 32U);
  EXPECT_EQ(gap.committed, 32U);
  EXPECT_EQ(overlap.status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(ReasonOf(overlap.status), "INDEX_CONFLICT");
}

}  // namespace
}  // namespace ebbtide::service
