// SPDX-License-Identifier: Apache-2.0
//
// A worker whose tiers fill up under it: refused where it can still turn back, told what is free,
// and taken up again once there is room.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "service/reason.h"
#include "tests/support/engine_stand.h"
#include "tests/support/random_seed.h"
#include "tests/support/status_matchers.h"
#include "tests/support/stepped_executor.h"

namespace ebbtide::service {
namespace {

using test::EngineStand;
using test::StatusIs;
using test::Tokens;
using test::Worker;
using testing::HasSubstr;

class FullTierTest : public testing::TestWithParam<uint64_t> {
 protected:
  // Prefills until a step is refused; returns the tokens that are in.
  int32_t FillUp(Worker& worker, StepAnswer* refusal) {
    for (int32_t first = 0;; first += 32) {
      for (int layer = 0; layer < tokens_.geometry.layers; ++layer) {
        *refusal = worker.Step({.layer = layer,
                                .first = first,
                                .count = 32,
                                .phase = Phase::kPrefill,
                                .sends_queries = false});
        if (refusal->status.ok()) continue;
        EXPECT_EQ(layer, 0) << "refused in mid-step";
        return first;
      }
      engine_.Settle();  // All that was promised room finds it.
      engine_.engine().CheckInvariants();
    }
  }

  const Tokens tokens_{.geometry = test::SmallGeometry()};
  EngineStand engine_{{.host_bytes = 512 << 10, .rocksdb_bytes = GetParam()}};
};

TEST_P(FullTierTest, PromptThatOutgrowsTheTiersIsRefusedWholeAndGoesOnOnceThereIsRoom) {
  Worker first(engine_.engine(), tokens_, "first");
  first.open = {.policy = "keydiff", .recall = "exact", .budget_tokens = 48, .chunk_tokens = 32};
  Worker second(engine_.engine(), tokens_, "second");
  second.open = first.open;
  ASSERT_OK(first.Open().status());
  ASSERT_OK(second.Open().status());
  StepAnswer refusal;
  ASSERT_GT(FillUp(first, &refusal), 0);

  const int32_t in = FillUp(second, &refusal);

  EXPECT_THAT(refusal.status, StatusIs(absl::StatusCode::kResourceExhausted,
                                       HasSubstr("where there is room for 1")));
  EXPECT_EQ(ReasonOf(refusal.status), "LOWER_TIERS_FULL");
  EXPECT_EQ(refusal.length, static_cast<uint64_t>(in));
  EXPECT_EQ(refusal.committed, static_cast<uint64_t>(in));

  ASSERT_OK(engine_.engine().CloseSequence("first"));
  EXPECT_OK(second.StepAllLayers({.first = in, .count = 32, .phase = Phase::kPrefill}).status);
  engine_.Settle();
  engine_.engine().CheckInvariants();
}

INSTANTIATE_TEST_SUITE_P(Tiers, FullTierTest, testing::Values(0, 33 << 20), [](const auto& test) {
  return test.param == 0 ? "HostAlone" : "HostAndRocksdb";
});

// Slot files hold records of one size each: what one model's blocks left half empty is no room for
// another's, and is not promised to it.
TEST(TwoModelsTest, WhatOneModelsBlocksHoldIsNotPromisedToAnother) {
  const Tokens small{.geometry = test::SmallGeometry()};
  Tokens large{.geometry = test::SmallGeometry()};
  large.geometry.layers = 8;
  EngineStand stand({.host_bytes = 1 << 20, .rocksdb_bytes = 36 << 20});
  std::vector<std::unique_ptr<Worker>> workers;
  const auto open = [&](const Tokens& tokens, const std::string& name) -> Worker& {
    Worker& worker = *workers.emplace_back(std::make_unique<Worker>(stand.engine(), tokens, name));
    worker.open = {.policy = "keydiff", .recall = "off", .budget_tokens = 48, .chunk_tokens = 32};
    EXPECT_OK(worker.Open().status());
    return worker;
  };
  const auto fill = [&](std::span<Worker* const> filled, int32_t first) {
    for (;; first += 32) {
      for (Worker* worker : filled) {
        const StepAnswer answer = worker->StepAllLayers(
            {.first = first, .count = 32, .phase = Phase::kPrefill, .sends_queries = false});
        if (!answer.status.ok()) {
          EXPECT_EQ(ReasonOf(answer.status), "LOWER_TIERS_FULL") << answer.status;
          return first;
        }
        stand.Settle();  // All that was promised room finds it.
      }
    }
  };
  std::vector<Worker*> smalls;
  for (int n = 0; n < 6; ++n) smalls.push_back(&open(small, "small " + std::to_string(n)));
  const int32_t each = fill(smalls, 0);
  ASSERT_GT(each, 32);
  for (int n = 0; n < 6; n += 2) {
    ASSERT_OK(stand.engine().CloseSequence("small " + std::to_string(n)));
  }
  Worker* const other = &open(large, "large");

  const int32_t in = fill({&other, 1}, 0);

  EXPECT_GE(in, 32);  // The host's part that became free.
  EXPECT_FALSE(stand.engine().GetStats().tiers[2].degraded);
  EXPECT_EQ(fill({&other, 1}, in), in);
  Worker* const last = &open(small, "last");
  EXPECT_GT(fill({&last, 1}, 0), each);  // Its size kept its place.
  stand.engine().CheckInvariants();
}

// Carriers come late: all is promised before a block has moved.
class LateCarriersTest : public testing::Test {
 protected:
  // A stand whose carriers come when they are told.
  struct Late {
    explicit Late(uint64_t host_bytes)
        : stand({.host_bytes = host_bytes, .rocksdb_bytes = 35 << 20, .carriers = &carriers}) {}
    service::Engine& engine() { return stand.engine(); }
    void Carry() {
      engine().CloseIdle();  // Kicks them.
      carriers.RunAll();
    }
    test::SteppedExecutor carriers;
    EngineStand stand;
  };
  static std::unique_ptr<Worker> WorkerOf(Late& late, const Tokens& tokens,
                                          const std::string& name) {
    auto worker = std::make_unique<Worker>(late.engine(), tokens, name);
    worker->open = {
        .policy = "keydiff", .recall = "off", .budget_tokens = 2048, .chunk_tokens = 16};
    return worker;
  }
  static absl::Status Step(Worker& worker, int32_t first) {
    return worker
        .StepAllLayers(
            {.first = first, .count = 16, .phase = Phase::kPrefill, .sends_queries = false})
        .status;
  }

  const Tokens small_{.geometry = test::SmallGeometry()};
  const Tokens large_ = [] {
    Tokens large{.geometry = test::SmallGeometry()};
    large.geometry.layers = 8;
    return large;
  }();
};

// The last slot file below is promised to the large blocks, and the oldest block is a small one.
TEST_F(LateCarriersTest, NoBlockTakesTheSlotFileThatAnotherSizeWasPromised) {
  for (uint64_t host_bytes = 640 << 10; host_bytes < 1200 << 10; host_bytes += 40 << 10) {
    Late late(host_bytes);
    const auto small = WorkerOf(late, small_, "small");
    const auto large = WorkerOf(late, large_, "large");
    ASSERT_OK(small->Open().status());
    ASSERT_OK(large->Open().status());
    ASSERT_OK(Step(*small, 0));
    absl::Status full;
    for (int32_t first = 0; full.ok(); first += 16) full = Step(*large, first);
    ASSERT_EQ(ReasonOf(full), "LOWER_TIERS_FULL");

    for (int i = 0; i < 50; ++i) late.Carry();

    EXPECT_TRUE(late.engine().Settle(absl::ZeroDuration())) << host_bytes << " B: no room";
    int32_t first = 16;
    for (full = absl::OkStatus(); full.ok(); first += 16) full = Step(*small, first);
    EXPECT_EQ(ReasonOf(full), "LOWER_TIERS_FULL");
    ASSERT_OK(late.engine().CloseSequence("large"));
    EXPECT_OK(Step(*small, first - 16));
  }
}

TEST_F(LateCarriersTest, AllThatIsPromisedFindsItsPlaceWheneverTheyCome) {
  int refused = 0;
  test::ForEachSeed(5, [this, &refused](uint64_t seed) {
    std::mt19937_64 random(seed);
    Late late((640 << 10) + random() % (512 << 10));
    struct Run {
      std::unique_ptr<Worker> worker;
      std::string name;
      int32_t first = 0;
    };
    std::vector<Run> runs;
    int opened = 0;
    for (int step = 0; step < 400; ++step) {
      const uint64_t choice = random() % 100;
      if (choice < 2 && !runs.empty()) {
        std::swap(runs[random() % runs.size()], runs.back());
        ASSERT_OK(late.engine().CloseSequence(runs.back().name));
        runs.pop_back();
      } else if (choice < 8) {
        late.Carry();
      } else if (runs.empty() || (choice < 20 && runs.size() < 4)) {
        const Tokens& tokens = random() % 2 == 0 ? small_ : large_;
        const std::string name = std::to_string(opened++);
        auto worker = WorkerOf(late, tokens, name);
        const absl::Status status = worker->Open().status();
        ASSERT_TRUE(status.ok() || ReasonOf(status) == "LOWER_TIERS_FULL") << status;
        if (status.ok()) runs.push_back({.worker = std::move(worker), .name = name});
      } else {
        Run& run = runs[random() % runs.size()];
        const absl::Status status = Step(*run.worker, run.first);
        if (status.ok()) run.first += 16;
        if (!status.ok()) ++refused;
        ASSERT_TRUE(status.ok() || ReasonOf(status) == "LOWER_TIERS_FULL") << status;
      }
      if (step % 40 == 0) late.engine().CheckInvariants();
    }
    for (int i = 0; i < 20; ++i) late.Carry();

    EXPECT_TRUE(late.engine().Settle(absl::ZeroDuration())) << "a block found no room";
  });
  EXPECT_GT(refused, 10) << "of all seeds: the tiers were hardly full";
}

TEST(FullHostTest, SequenceThatWouldKeepMoreThanTheHostHoldsIsNotOpened) {
  const Tokens tokens{.geometry = test::SmallGeometry()};
  EngineStand stand({.host_bytes = 512 << 10});
  const uint64_t used = stand.engine().GetStats().tiers[1].used_bytes;
  Worker worker(stand.engine(), tokens, "a");
  worker.open = {.policy = "keydiff", .recall = "exact", .budget_tokens = 100'000};

  const absl::Status refusal = worker.Open().status();

  EXPECT_THAT(refusal, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("host tier")));
  EXPECT_EQ(ReasonOf(refusal), "LOWER_TIERS_FULL");
  EXPECT_EQ(stand.engine().GetStats().tiers[1].used_bytes, used);

  worker.open.budget_tokens = 48;
  ASSERT_OK(worker.Open().status());
  const uint64_t open = stand.engine().GetStats().tiers[1].used_bytes;
  EXPECT_GT(open, used);
  ASSERT_OK(worker.Open().status());  // Again: charged once.
  EXPECT_EQ(stand.engine().GetStats().tiers[1].used_bytes, open);
  ASSERT_OK(stand.engine().CloseSequence("a"));
  EXPECT_EQ(stand.engine().GetStats().tiers[1].used_bytes, used);
}

TEST(FullHostTest, RoomThatBlocksArePromisedIsTakenByNoSequenceThatOpens) {
  const Tokens tokens{.geometry = test::SmallGeometry()};
  test::SteppedExecutor carriers;  // Nothing is sealed yet.
  EngineStand stand({.host_bytes = 512 << 10, .carriers = &carriers});
  Worker worker(stand.engine(), tokens, "a");
  worker.open = {.policy = "keydiff", .recall = "off", .budget_tokens = 2048, .chunk_tokens = 16};
  ASSERT_OK(worker.Open().status());
  absl::Status full;
  for (int32_t first = 0; full.ok(); first += 16) {
    full = worker
               .StepAllLayers(
                   {.first = first, .count = 16, .phase = Phase::kPrefill, .sends_queries = false})
               .status;
  }
  ASSERT_EQ(ReasonOf(full), "LOWER_TIERS_FULL");
  ASSERT_LT(stand.host_budget().used_bytes(), stand.host_budget().limit_bytes() / 2);

  absl::Status refusal;
  for (int n = 0; refusal.ok() && n < 200; ++n) {
    Worker other(stand.engine(), tokens, "other " + std::to_string(n));
    other.open = {.policy = "keydiff", .recall = "off", .budget_tokens = 48, .chunk_tokens = 32};
    refusal = other.Open().status();
  }

  EXPECT_THAT(refusal, StatusIs(absl::StatusCode::kResourceExhausted,
                                HasSubstr("blocks of open sequences need")));
  EXPECT_EQ(ReasonOf(refusal), "LOWER_TIERS_FULL");
  stand.engine().CloseIdle();  // Kicks the carriers.
  carriers.RunAll();
  EXPECT_TRUE(stand.engine().Settle(absl::ZeroDuration())) << "a block found no room";
  stand.engine().CheckInvariants();
}

// Slots first, host memory after: a call that waits for slots holds nothing others could use.
TEST(ReservationTest, CallThatFindsNoSlotsNeverChargedTheHost) {
  const Tokens tokens{.geometry = test::SmallGeometry()};
  test::SteppedExecutor carriers;  // Nothing is sealed.
  class Spy final : public Clock {
   public:
    absl::Duration SinceStart() const override {
      if (budget != nullptr) most_used = std::max(most_used, budget->used_bytes());
      return SteadyClock().SinceStart();
    }
    storage::ByteBudget* budget = nullptr;
    mutable uint64_t most_used = 0;
  } clock;
  EngineStand engine({.carriers = &carriers, .clock = &clock});
  Worker worker(engine.engine(), tokens, "a");
  worker.open = {.policy = "keydiff", .recall = "off", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(worker.Open().status());
  StepAnswer answer;
  int32_t first = 0;
  uint64_t used = 0;
  for (; answer.status.ok(); first += 32) {
    used = engine.host_budget().used_bytes();
    clock.budget = &engine.host_budget();
    clock.most_used = 0;
    answer = worker.StepAllLayers({.first = first,
                                   .count = 32,
                                   .phase = Phase::kPrefill,
                                   .sends_queries = false,
                                   .patience = absl::Milliseconds(1)});
    clock.budget = nullptr;
  }

  EXPECT_EQ(ReasonOf(answer.status), "DEVICE_FULL");
  EXPECT_GT(first, 32);
  EXPECT_EQ(clock.most_used, used);
}

}  // namespace
}  // namespace ebbtide::service
