// SPDX-License-Identifier: Apache-2.0
//
// Carriers whose device, tiers or memory fail them: they go on, leave nothing behind, and say so
// once.

#include <cstdint>
#include <cstdio>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "base/log.h"
#include "service/engine.h"
#include "tests/support/engine_stand.h"
#include "tests/support/fake_clock.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/status_matchers.h"
#include "tests/support/stepped_executor.h"
#include "tests/unit/service/breakable_engine.h"

namespace ebbtide::service {
namespace {

using test::BreakableEngine;
using test::EngineStand;
using test::FaultyBackend;
using test::Tokens;
using test::Worker;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Pair;

// Kicks the carriers, time and again with the next call ending in an exception, until none does.
int BreakCarriersEverywhere(BreakableEngine& side) {
  for (int n = 0;; ++n) {
    side.breaker.BreakAt(n);
    side.engine().CloseIdle();
    side.carriers.RunAll();
    const bool has_broken = side.breaker.has_broken();
    side.breaker.Heal();
    side.engine().CheckInvariants();
    if (!has_broken) return n;
  }
}

TEST(BrokenCarriersTest, GoOnAndLeaveNothingBehind) {
  const Tokens tokens{.geometry = test::SmallGeometry()};
  BreakableEngine side(tokens, {.host_bytes = 260 << 10, .rocksdb_bytes = 192 << 20});
  const uint64_t before_open = side.stand.host_budget().used_bytes();
  side.worker.open = {
      .policy = "streaming", .recall = "exact", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(side.worker.Open().status());
  const uint64_t at_open = side.stand.host_budget().used_bytes();
  int broken = 0;
  for (int32_t first = 0; first < 512; first += 32) {
    ASSERT_OK(
        side.worker.StepAllLayers({.first = first, .count = 32, .phase = Phase::kPrefill}).status);
    broken += BreakCarriersEverywhere(side);
  }
  EXPECT_GT(broken, 50);
  const Stats stats = side.engine().GetStats();
  EXPECT_EQ(stats.blocks_sealed, 32U);
  EXPECT_GT(stats.blocks_moved_down, 10U);
  EXPECT_EQ(stats.tiers[1].blocks + stats.tiers[2].blocks, 32U);
  EXPECT_THAT(stats.carries_failed, ElementsAre(Pair("OUT_OF_MEMORY", testing::Gt(25U))));
  const StepAnswer answer = side.worker.StepAllLayers({.first = 512});
  ASSERT_OK(answer.status);
  EXPECT_EQ(answer.certificate.met[0], 1);
  EXPECT_EQ(test::ErrorsOf(answer, tokens, 1, 512, 1).violations, 0);
  EXPECT_GT(side.stand.host_budget().used_bytes(), at_open);

  ASSERT_OK(side.engine().CloseSequence("a"));

  EXPECT_EQ(side.stand.host_budget().used_bytes(), before_open);
  EXPECT_EQ(side.engine().GetStats().tiers[0].used_bytes, 0U);
}

// What a Close could not erase or zero, carriers do.
TEST(BrokenCarriersTest, SettleWhatAClosedSequenceIsOwed) {
  const Tokens tokens{.geometry = test::SmallGeometry()};
  bool has_broken = true;
  for (int n = 0; has_broken; ++n) {
    BreakableEngine side(tokens, {.host_bytes = 260 << 10, .rocksdb_bytes = 192 << 20});
    const uint64_t before_open = side.stand.host_budget().used_bytes();
    side.worker.open = {
        .policy = "streaming", .recall = "exact", .budget_tokens = 48, .chunk_tokens = 32};
    ASSERT_OK(side.worker.Open().status());
    for (int32_t first = 0; first < 320; first += 32) {
      ASSERT_OK(side.worker.StepAllLayers({.first = first, .count = 32, .phase = Phase::kPrefill})
                    .status);
      side.carriers.RunAll();
    }
    ASSERT_GT(side.engine().GetStats().tiers[2].blocks, 0U);
    side.breaker.BreakAt(n);

    ASSERT_OK(side.engine().CloseSequence("a"));

    has_broken = side.breaker.has_broken();
    side.breaker.Heal();
    side.engine().CloseIdle();
    side.carriers.RunAll();
    const Stats stats = side.engine().GetStats();
    EXPECT_EQ(stats.carries_failed.contains("OUT_OF_MEMORY"), has_broken) << n;
    EXPECT_EQ(stats.tiers[0].used_bytes, 0U) << n;
    EXPECT_EQ(stats.tiers[1].blocks, 0U) << n;
    EXPECT_EQ(stats.tiers[2].blocks, 0U) << n;
    EXPECT_EQ(side.stand.host_budget().used_bytes(), before_open) << n;
    EXPECT_TRUE(has_broken || n > 3);  // Tiers and device were called.
  }
}

// A device that fails when told, a clock and carriers that the test moves, and the log in a file.
class FailingCarriersTest : public testing::Test {
 protected:
  FailingCarriersTest() { SetUpLog({.form = LogForm::kText, .fd = ::fileno(log_)}); }
  ~FailingCarriersTest() override {
    SetUpLog(LogOptions{});
    std::fclose(log_);
  }

  void Carry() {
    stand_.engine().CloseIdle();
    carriers_.RunAll();
  }
  Stats Counters() { return stand_.engine().GetStats(); }
  // Since it was asked last.
  std::vector<std::string> LogLines() {
    EXPECT_TRUE(FlushLog(absl::Seconds(10)));
    std::string text;
    std::fseek(log_, read_, SEEK_SET);
    for (int c = std::fgetc(log_); c != EOF; c = std::fgetc(log_))
      text.push_back(static_cast<char>(c));
    read_ = std::ftell(log_);
    return absl::StrSplit(text, '\n', absl::SkipEmpty());
  }

  std::FILE* const log_ = std::tmpfile();
  int64_t read_ = 0;
  const Tokens tokens_{.geometry = test::SmallGeometry()};
  test::FakeClock clock_;
  test::SteppedExecutor carriers_;
  FaultyBackend* device_ = nullptr;
  EngineStand stand_{{.carriers = &carriers_,
                      .clock = &clock_,
                      .idle_timeout = absl::Hours(100),
                      .wrap_backend = [this](gpu::Backend& backend) {
                        auto faulty = std::make_unique<FaultyBackend>(backend);
                        device_ = faulty.get();
                        return faulty;
                      }}};
  Worker worker_{stand_.engine(), tokens_, "a", clock_};
};

TEST_F(FailingCarriersTest, SealThatTheDeviceFailsIsCountedTriedAgainAndSeenByHealth) {
  worker_.open = {.policy = "streaming", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(worker_.Open().status());
  ASSERT_OK(worker_.StepAllLayers({.count = 32, .phase = Phase::kPrefill}).status);
  EXPECT_FALSE(stand_.engine().is_device_lost());
  device_->Fail(&FaultyBackend::Is<gpu::GatherArgs>);

  Carry();

  EXPECT_THAT(Counters().carries_failed, ElementsAre(Pair("DEVICE_LOST", 1U)));
  EXPECT_THAT(Counters().refused, IsEmpty());
  EXPECT_TRUE(stand_.engine().is_device_lost());
  EXPECT_EQ(Counters().blocks_sealed, 0U);
  device_->Heal();
  Carry();
  EXPECT_EQ(Counters().blocks_sealed, 2U);
  EXPECT_TRUE(stand_.engine().is_device_lost()) << "a device that was lost is trusted again";
}

TEST_F(FailingCarriersTest, SealsThatFailAreLoggedOnceAMinute) {
  worker_.open = {.policy = "streaming", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(worker_.Open().status());
  ASSERT_OK(worker_.StepAllLayers({.count = 32, .phase = Phase::kPrefill}).status);
  device_->Fail(&FaultyBackend::Is<gpu::GatherArgs>);
  LogLines();

  for (int i = 0; i < 5; ++i) Carry();

  EXPECT_THAT(LogLines(), ElementsAre(AllOf(HasSubstr("a block is not sealed yet"),
                                            HasSubstr("DEVICE_LOST"), HasSubstr("failures=1"))));
  clock_.Advance(absl::Minutes(1));
  for (int i = 0; i < 5; ++i) Carry();
  EXPECT_THAT(LogLines(), ElementsAre(HasSubstr("failures=5")));
  EXPECT_THAT(Counters().carries_failed, ElementsAre(Pair("DEVICE_LOST", 10U)));
}

TEST_F(FailingCarriersTest, ReasonsThatTakeTurnsAreEachLoggedOnceAMinute) {
  worker_.open = {.policy = "streaming", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(worker_.Open().status());
  ASSERT_OK(worker_.StepAllLayers({.count = 32, .phase = Phase::kPrefill}).status);
  const auto take_turns = [&] {
    device_->Fail(&FaultyBackend::Is<gpu::GatherArgs>);
    Carry();
    device_->Fail([](const gpu::Batch&) -> bool { throw std::bad_alloc(); });
    Carry();
  };
  LogLines();

  for (int i = 0; i < 5; ++i) take_turns();

  EXPECT_THAT(LogLines(), ElementsAre(AllOf(HasSubstr("DEVICE_LOST"), HasSubstr("failures=1")),
                                      AllOf(HasSubstr("OUT_OF_MEMORY"), HasSubstr("failures=1"))));
  clock_.Advance(absl::Minutes(1));
  take_turns();
  EXPECT_THAT(LogLines(), ElementsAre(AllOf(HasSubstr("DEVICE_LOST"), HasSubstr("failures=5")),
                                      AllOf(HasSubstr("OUT_OF_MEMORY"), HasSubstr("failures=5"))));
}

TEST_F(FailingCarriersTest, FramesThatAreOwedAreLoggedWhenTheyComeAndGo) {
  worker_.open = {.policy = "streaming", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(worker_.Open().status());
  device_->Fail(&FaultyBackend::Is<gpu::ZeroArgs>);
  LogLines();

  ASSERT_OK(stand_.engine().CloseSequence("a"));
  for (int i = 0; i < 5; ++i) Carry();

  EXPECT_THAT(LogLines(), ElementsAre(HasSubstr("are not zeroed yet")));
  EXPECT_THAT(Counters().carries_failed, ElementsAre(Pair("DEVICE_LOST", 6U)));
  EXPECT_GT(Counters().tiers[0].used_bytes, 0U);
  device_->Heal();
  for (int i = 0; i < 5; ++i) Carry();
  EXPECT_THAT(LogLines(), ElementsAre(HasSubstr("are zeroed")));
  EXPECT_EQ(Counters().tiers[0].used_bytes, 0U);
}

}  // namespace
}  // namespace ebbtide::service
