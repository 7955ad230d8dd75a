// SPDX-License-Identifier: Apache-2.0
//
// The honest worker against a daemon that is plainly right, and against one that lies.

#include "client/cli/player.h"

#include <cmath>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"
#include "tests/unit/client/synthetic_trace.h"
#include "tests/unit/client/tiny_daemon.h"

namespace ebbtide::cli {
namespace {

using test::StatusIs;
using testing::ElementsAre;
using testing::Pair;

class PlayerTest : public testing::Test {
 protected:
  explicit PlayerTest(const SyntheticSpec& spec = {})
      : trace_(*ParseTrace(MakeSyntheticFile(spec).Bytes(), {})),
        client_(*client::Client::Connect(daemon_.target())) {
    ParallelFor parallel(1);
    for (const TraceLayer& layer : trace_.layers) {
      truths_.push_back(*ComputeTruth(trace_, layer, parallel, [](uint64_t) {}));
    }
  }

  absl::StatusOr<RunReport> Run(const RunSpec& spec) {
    return Play(client_, {.trace = trace_, .truths = truths_}, spec, [this](uint64_t tokens) {
      return tokens == stop_at_ ? absl::CancelledError("stop") : absl::OkStatus();
    });
  }

  RunSpec Spec(const std::string& recall) const {
    return {.policy = "h2o", .recall = recall, .budget = {.tokens = 10}};
  }

  test::TempFolder folder_;
  TinyDaemon daemon_{(folder_.path() / "s").string()};
  const Trace trace_;
  const client::Client client_;
  std::vector<LayerTruth> truths_;
  uint64_t stop_at_ = UINT64_MAX;
};

TEST_F(PlayerTest, CallsComeAsAnEngineWouldMakeThem) {
  ASSERT_OK(Run({.policy = "h2o", .budget = {.tokens = 10}, .chunk = 16}));

  const std::vector<PlayedCall> calls = daemon_.calls();

  ASSERT_EQ(calls.size(), 2U * (2 + 16));
  EXPECT_EQ(calls[0], (PlayedCall{.layer = 0, .first_index = 0, .count = 16}));
  EXPECT_EQ(calls[1], (PlayedCall{.layer = 1, .first_index = 0, .count = 16}));
  EXPECT_EQ(calls[2], (PlayedCall{.layer = 0, .prompt_end = true, .first_index = 16, .count = 8}));
  EXPECT_EQ(calls[3], (PlayedCall{.layer = 1, .prompt_end = true, .first_index = 16, .count = 8}));
  EXPECT_EQ(calls[4], (PlayedCall{.layer = 0, .is_decode = true, .first_index = 24, .count = 1}));
  EXPECT_EQ(calls[5], (PlayedCall{.layer = 1, .is_decode = true, .first_index = 24, .count = 1}));
}

TEST_F(PlayerTest, WhatItWasToldIsReported) {
  ASSERT_OK_AND_ASSIGN(const RunReport run,
                       Run({.policy = "h2o", .budget = {.percent = 25, .of_tokens = 40}}));

  EXPECT_EQ(run.policy, "h2o");
  EXPECT_EQ(run.policy_resolved, "h2o+resolved");
  EXPECT_EQ(run.recall, "bounded(0.02)");
  EXPECT_EQ(run.prefill, "exact");
  EXPECT_EQ(run.budget_tokens, 10U);
  EXPECT_EQ(run.protected_tokens, 4U);
  EXPECT_EQ(run.host_budget_bytes, 4096U);
  EXPECT_EQ(run.tokens.host, 11U);
  EXPECT_EQ(run.demotions, 7U);
}

TEST_F(PlayerTest, ExactAnswersAreSound) {
  ASSERT_OK_AND_ASSIGN(const RunReport run, Run(Spec("bounded(0.02)")));

  EXPECT_TRUE(run.is_sound());
  EXPECT_LT(run.rel_error.max, 1e-6);
  EXPECT_GT(run.rel_error.max, 0);  // The output is f32, the truth f64.
  EXPECT_LT(run.prefill_rel_error.max, 1e-6);
  EXPECT_EQ(run.not_met, 0U);
  EXPECT_EQ(run.answers_above_target, 0.0);
}

TEST_F(PlayerTest, DiscardedTokensAreAnErrorThatTheCertificateCovers) {
  ASSERT_OK_AND_ASSIGN(const RunReport run, Run(Spec("off")));

  EXPECT_TRUE(run.is_sound());
  EXPECT_GT(run.rel_error.p50, 0.01);
  EXPECT_LT(run.prefill_rel_error.max, 1e-6);
  EXPECT_THAT(run.not_met_by_reason, ElementsAre(Pair("RECALL_OFF", 2 * 16)));
  EXPECT_NEAR(run.bound_over_error.p50, 1.5, 0.01);
  // Normalised alike: the fake certifies half as much again as the error of each head.
  EXPECT_NEAR(run.certified_rel_error.mean, 1.5 * run.rel_error.mean, 1e-3);
  EXPECT_NEAR(run.certified_rel_error.max, 1.5 * run.rel_error.max, 1e-3);
  EXPECT_EQ(run.answers_above_target, std::nullopt);
}

TEST_F(PlayerTest, ErrorsAboveTheTargetAreCounted) {
  ASSERT_OK_AND_ASSIGN(const RunReport run, Run(Spec("estimated(1e-12)")));

  EXPECT_EQ(run.answers_above_target, 1.0);  // Rounding to f32 alone is more.
}

TEST_F(PlayerTest, AModeWithoutATargetMayBeHeldAgainstOne) {
  RunSpec spec = Spec("off");
  spec.target = 1e-12;

  ASSERT_OK_AND_ASSIGN(const RunReport run, Run(spec));

  EXPECT_EQ(run.answers_above_target, 1.0);
}

TEST_F(PlayerTest, ABoundBelowTheErrorIsAViolation) {
  daemon_.set_faults({.bound_factor = 0.9});

  ASSERT_OK_AND_ASSIGN(const RunReport run, Run(Spec("off")));

  EXPECT_FALSE(run.is_sound());
  EXPECT_GT(run.certificate_violations, 0U);
}

TEST_F(PlayerTest, ALessThanTrueMassBoundIsAViolation) {
  daemon_.set_faults({.mass_factor = 0.9});

  ASSERT_OK_AND_ASSIGN(const RunReport run, Run(Spec("off")));

  EXPECT_GT(run.certificate_violations, 0U);
}

TEST_F(PlayerTest, EveryByteIsReadBack) {
  ASSERT_OK_AND_ASSIGN(const RunReport run, Run(Spec("off")));

  EXPECT_EQ(run.bytes_checked, trace_.kv_bytes());
  EXPECT_EQ(run.byte_mismatches, 0U);
  // Pages of 16, 16 and 8 tokens in turn in host and rocksdb, 64 bytes a token, two layers.
  EXPECT_THAT(run.bytes_checked_by_tier,
              ElementsAre(Pair("host", 24 * 64 * 2), Pair("rocksdb", 16 * 64 * 2)));
}

TEST_F(PlayerTest, OneFlippedBitIsOneMismatch) {
  daemon_.set_faults({.flip_key_of = 17});

  ASSERT_OK_AND_ASSIGN(const RunReport run, Run(Spec("off")));

  EXPECT_EQ(run.byte_mismatches, 1U);
  EXPECT_FALSE(run.is_sound());
}

TEST_F(PlayerTest, ACorruptPageIsLostInFull) {
  daemon_.set_faults({.corrupt_page = 1});

  ASSERT_OK_AND_ASSIGN(const RunReport run, Run(Spec("off")));

  EXPECT_EQ(run.bytes_lost, 2U * 16 * 8 * 2);
  EXPECT_EQ(run.byte_mismatches, 0U);
  EXPECT_FALSE(run.is_sound());
  EXPECT_EQ(run.bytes_checked, trace_.kv_bytes());
}

TEST_F(PlayerTest, WorkIsCountedPerStepOverAllLayers) {
  ASSERT_OK_AND_ASSIGN(const RunReport run, Run(Spec("exact")));

  EXPECT_EQ(run.absent_pages, 12);
  EXPECT_EQ(run.touched_pages.total, 4);
  EXPECT_THAT(run.touched_pages.by_rung, ElementsAre(Pair("pages", 4)));
  EXPECT_THAT(run.touched_bytes.by_tier, ElementsAre(Pair("rocksdb", 200)));
}

TEST_F(PlayerTest, AskingPlaysNothingAndLeavesNothingOpen) {
  EXPECT_OK(Ask(client_, trace_, Spec("off")));

  EXPECT_THAT(daemon_.calls(), testing::IsEmpty());
  EXPECT_EQ(daemon_.open_sequences(), 0);
}

TEST_F(PlayerTest, AChunkBeyondALimitIsRefusedWithIt) {
  for (const auto& [chunk, prefill, limit] :
       std::vector<std::tuple<uint32_t, const char*, const char*>>{
           {1000, "exact", "--chunk 1000: the daemon takes 512 tokens per call at most"},
           {65, "blockwise(64)", "--chunk 65: prefill blockwise(64) takes 64 tokens per call"}}) {
    RunSpec spec = Spec("off");
    spec.chunk = chunk;
    spec.prefill = prefill;

    EXPECT_THAT(Ask(client_, trace_, spec),
                StatusIs(absl::StatusCode::kInvalidArgument, testing::HasSubstr(limit)));
    EXPECT_EQ(daemon_.open_sequences(), 0);
  }
  RunSpec most = Spec("off");
  most.chunk = 64;
  most.prefill = "blockwise(64)";
  EXPECT_OK(Ask(client_, trace_, most));
}

TEST_F(PlayerTest, TheSequenceIsClosedWhateverHappened) {
  ASSERT_OK(Run(Spec("off")));
  EXPECT_EQ(daemon_.open_sequences(), 0);

  daemon_.set_faults({.refuse_at = 30});
  EXPECT_THAT(Run(Spec("off")), StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(daemon_.open_sequences(), 0);

  stop_at_ = 26;
  EXPECT_THAT(Run(Spec("off")), StatusIs(absl::StatusCode::kCancelled));
  EXPECT_EQ(daemon_.open_sequences(), 0);
}

class PlayerOfAPromptTest : public PlayerTest {
 protected:
  PlayerOfAPromptTest() : PlayerTest({.tokens = 24, .prompt_length = 24}) {}
};

TEST_F(PlayerOfAPromptTest, OfStepsThatNobodyTookNothingIsSaid) {
  ASSERT_OK_AND_ASSIGN(const RunReport run, Run(Spec("bounded(0.02)")));

  EXPECT_FALSE(run.has_steps());
  EXPECT_EQ(run.rel_error.count, 0U);
  EXPECT_EQ(run.step_seconds.count, 0U);
  EXPECT_EQ(run.answers_above_target, std::nullopt);
  EXPECT_EQ(run.prefill_rel_error.count, 2U * 24);
}

TEST(ChunkForTest, SuitsThePrefillMode) {
  EXPECT_EQ(ChunkFor(""), 512U);
  EXPECT_EQ(ChunkFor("exact"), 512U);
  EXPECT_EQ(ChunkFor("blockwise(256)"), 128U);
  EXPECT_EQ(ChunkFor("blockwise(64)"), 64U);
}

TEST(TargetOfTest, IsTheArgumentOfAModeThatHasOne) {
  EXPECT_EQ(TargetOf("bounded(0.02)"), 0.02);
  EXPECT_EQ(TargetOf("estimated(1e-3)"), 1e-3);
  EXPECT_EQ(TargetOf("off"), std::nullopt);
  EXPECT_EQ(TargetOf("exact"), std::nullopt);
}

}  // namespace
}  // namespace ebbtide::cli
