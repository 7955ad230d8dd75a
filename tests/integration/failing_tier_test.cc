// SPDX-License-Identifier: Apache-2.0
//
// A recorded model played over the wire while the RocksDB tier fails: whatever it does,
// certificates stay true, no wrong byte is called data, and what was not reached says why.

#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/integration/replay_stand.h"
#include "tests/support/fake_clock.h"
#include "tests/support/faulty_file_calls.h"
#include "tests/support/faulty_tier.h"
#include "tests/support/status_matchers.h"
#include "tests/support/stepped_executor.h"

namespace ebbtide::test {
namespace {

using cli::RunReport;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::Gt;
using testing::HasSubstr;
using testing::Pair;

constexpr uint64_t kSeed = 7;
constexpr uint64_t kUnsealedTokens = 48;  // Slots linger for 64, less a page that is incomplete.

// By recall mode.
class FailingTierTest : public testing::TestWithParam<const char*> {
 protected:
  // Everything below the device lies in the RocksDB tier: the host tier takes no block.
  ReplayStand MakeStand() {
    return ReplayStand({.host_bytes = 2 << 20,  // Exact pages are staged a few at a time.
                        .rocksdb_bytes = 192 << 20,
                        .clock = &clock_,
                        .file_calls = &files_,
                        .wrap_host =
                            [](storage::Tier& tier) {
                              auto full = std::make_unique<FaultyTier>(tier, kSeed);
                              full->Set({.full = 1});
                              return full;
                            },
                        .wrap_rocksdb =
                            [this](storage::Tier& tier) {
                              auto faulty = std::make_unique<FaultyTier>(tier, kSeed);
                              rocksdb_ = faulty.get();
                              return faulty;
                            }});
  }

  cli::RunSpec Spec() const {
    return {.policy = "h2o", .recall = GetParam(), .budget = {.tokens = 48}, .chunk = 256};
  }

  uint64_t prompt_length() const { return TheSmallTrace().trace.prompt_length; }

  // Faults from the end of the prompt on, for as many tokens as the device holds unsealed; the rest
  // is played and bytes are read back after.
  absl::StatusOr<RunReport> PlayWith(ReplayStand& stand, const Faults& faults) {
    return stand.Play(Spec(), [&](uint64_t played) {
      if (played == prompt_length()) {
        stand.engine().Settle();
        rocksdb_->Set(faults);
      }
      if (played == prompt_length() + kUnsealedTokens) {
        rocksdb_->Set({});
        stand.engine().engine().CloseIdle();  // As each second.
      }
    });
  }

  FakeClock clock_;
  FaultyFileCalls files_;
  FaultyTier* rocksdb_ = nullptr;
};

void ExpectTrueAndWhole(const RunReport& run) {
  EXPECT_EQ(run.certificate_violations, 0U);
  EXPECT_EQ(run.byte_mismatches, 0U);
  EXPECT_EQ(run.bytes_lost, 0U);
}

TEST_P(FailingTierTest, AHealthyTierMeetsEveryAnswer) {
  ReplayStand stand = MakeStand();

  ASSERT_OK_AND_ASSIGN(const RunReport run, PlayWith(stand, {}));

  ExpectTrueAndWhole(run);
  EXPECT_EQ(run.not_met, 0U);
  EXPECT_GT(run.demotions, 0U);
  EXPECT_THAT(run.touched_bytes.by_tier, Contains(Pair("rocksdb", Gt(0))));
}

TEST_P(FailingTierTest, ARefusingTierIsNamedInTheAnswersItSpoils) {
  ReplayStand stand = MakeStand();

  ASSERT_OK_AND_ASSIGN(const RunReport run, PlayWith(stand, {.refuse = 1}));

  ExpectTrueAndWhole(run);
  EXPECT_GT(run.not_met, 0U);
  EXPECT_THAT(run.not_met_by_reason, ElementsAre(Pair("TIER_UNAVAILABLE", run.not_met)));
}

TEST_P(FailingTierTest, ATierSlowerThanTheDeadlineIsNotWaitedFor) {
  ReplayStand stand = MakeStand();

  ASSERT_OK_AND_ASSIGN(const RunReport run,
                       PlayWith(stand, {.delay = 1, .on_delay = [this] {
                                          clock_.Advance(absl::Minutes(2));  // The call has one.
                                        }}));

  ExpectTrueAndWhole(run);
  EXPECT_GT(run.not_met, 0U);
  EXPECT_THAT(run.not_met_by_reason, ElementsAre(Pair("DEADLINE", run.not_met)));
}

// Bytes written wrong from the first block on.
TEST_P(FailingTierTest, DamagedBytesAreNamedAndNeverData) {
  for (const auto& [faults, name] :
       {std::pair{Faults{.torn = 1}, "torn"}, std::pair{Faults{.flipped = 1}, "flipped"}}) {
    ReplayStand stand = MakeStand();
    rocksdb_->Set(faults);

    ASSERT_OK_AND_ASSIGN(const RunReport run, stand.Play(Spec()));

    EXPECT_GT(rocksdb_->damaged_records(), 0U) << name;
    EXPECT_EQ(run.certificate_violations, 0U) << name;
    EXPECT_EQ(run.byte_mismatches, 0U) << name;
    EXPECT_GT(run.bytes_lost, 0U) << name;
    EXPECT_GT(run.not_met, 0U) << name;
    EXPECT_THAT(run.not_met_by_reason, ElementsAre(Pair("CORRUPT_PAGE", run.not_met))) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(Recall, FailingTierTest, testing::Values("bounded(0.02)", "exact"),
                         [](const auto& test) {
                           return std::string(test.param) == "exact" ? "Exact" : "Bounded";
                         });

// A host tier of a few blocks over a disk that fills up. Blocks are carried after each step.
class FullDiskTest : public testing::Test {
 protected:
  static constexpr uint64_t kHostBytes = 720 << 10;  // Six blocks of the small trace, about.

  absl::StatusOr<RunReport> Play(const std::function<void(uint64_t)>& at = [](uint64_t) {}) {
    return stand_.Play({.policy = "h2o", .recall = "exact", .budget = {.tokens = 48}, .chunk = 256},
                       [&](uint64_t played) {
                         carriers_.RunAll();
                         at(played);
                       });
  }

  service::TierReport Rocksdb() {
    const service::Stats stats = stand_.engine().engine().GetStats();
    for (const service::TierReport& tier : stats.tiers) {
      if (tier.tier == service::TierName::kRocksdb) return tier;
    }
    ADD_FAILURE() << "no such tier";
    return {};
  }

  SteppedExecutor carriers_;
  FaultyFileCalls files_;
  ReplayStand stand_{{.host_bytes = kHostBytes,
                      .rocksdb_bytes = 192 << 20,
                      .carriers = &carriers_,
                      .file_calls = &files_}};
};

TEST_F(FullDiskTest, ReadsGoOnWhileTheHostHasRoom) {
  constexpr uint64_t kFullFrom = 224;  // Of 256 tokens.
  service::TierReport before;

  ASSERT_OK_AND_ASSIGN(const RunReport run, Play([&](uint64_t played) {
                         if (played != kFullFrom) return;
                         before = Rocksdb();
                         files_.write_error = ENOSPC;
                       }));

  ExpectTrueAndWhole(run);
  EXPECT_EQ(run.not_met, 0U);
  EXPECT_THAT(run.touched_bytes.by_tier, Contains(Pair("rocksdb", Gt(0))));
  EXPECT_GT(before.blocks, 0U);
  EXPECT_FALSE(before.degraded);
  const service::TierReport after = Rocksdb();
  EXPECT_TRUE(after.degraded);
  EXPECT_THAT(after.degraded_why, HasSubstr("No space left"));
}

TEST_F(FullDiskTest, WhatFindsNoRoomIsRefusedAtOnceAndTakenOnceTheDiskHeals) {
  files_.write_error = ENOSPC;

  const auto run = Play();

  EXPECT_THAT(run, StatusIs(absl::StatusCode::kResourceExhausted,
                            AllOf(HasSubstr("there is room for"), HasSubstr("rocksdb budget"))));
  EXPECT_EQ(client::ErrorReason(run.status()), "LOWER_TIERS_FULL");
  EXPECT_TRUE(Rocksdb().degraded);
  files_.write_error = 0;
  stand_.engine().engine().CloseIdle();  // As each second: it finds the tier well.
  EXPECT_FALSE(Rocksdb().degraded);
  ASSERT_OK_AND_ASSIGN(const RunReport healed, Play());
  ExpectTrueAndWhole(healed);
  EXPECT_EQ(healed.not_met, 0U);
  EXPECT_FALSE(Rocksdb().degraded);
}

}  // namespace
}  // namespace ebbtide::test
