// SPDX-License-Identifier: Apache-2.0
//
// What a worker sees when a part under the engine fails: pages damaged or gone, a disk that hangs,
// a device that fails in any part of a call. A twin that never met the fault says what is right.

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "service/engine.h"
#include "service/movement/mover.h"
#include "service/movement/page_source.h"
#include "service/reason.h"
#include "storage/patient_tier.h"
#include "tests/support/comes_true.h"
#include "tests/support/engine_stand.h"
#include "tests/support/fake_clock.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/faulty_tier.h"
#include "tests/support/status_matchers.h"
#include "tests/support/stepped_executor.h"

namespace ebbtide::service {
namespace {

using test::ComesTrue;
using test::EngineSetup;
using test::EngineStand;
using test::ErrorsOf;
using test::FaultyBackend;
using test::FaultyTier;
using test::SmallGeometry;
using test::StatusIs;
using test::Tokens;
using test::Worker;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<bool> ResidentsOf(Engine& engine, uint32_t layer) {
  const auto lane = engine.Describe({.sequence = "a", .with_tokens = true, .layer = layer});
  EXPECT_OK(lane.status());
  std::vector<bool> residents;
  for (const TokenDescription& token : lane->tokens) residents.push_back(token.resident);
  return residents;
}

std::vector<std::byte> BytesOf(Engine& engine, uint32_t layer) {
  const auto pages = engine.ReadPages({.sequence = "a", .layer = layer});
  EXPECT_OK(pages.status());
  std::vector<std::byte> bytes;
  for (const PageBytes& page : *pages) {
    bytes.insert(bytes.end(), page.k.begin(), page.k.end());
    bytes.insert(bytes.end(), page.v.begin(), page.v.end());
  }
  return bytes;
}

// The host tier: carriers have moved down what is over it.
bool ComesUnderItsWatermark(EngineStand& stand) {
  const uint64_t watermark = stand.host_budget().limit_bytes() / 100 * kDemoteAbovePercent;
  return ComesTrue([&] {
    stand.engine().CloseIdle();
    return stand.host_budget().used_bytes() <= watermark;
  });
}

// Puts a faulty tier before a real one; `faulty` is told which.
std::function<std::unique_ptr<storage::Tier>(storage::Tier&)> MadeFaulty(FaultyTier*& faulty) {
  return [&faulty](storage::Tier& tier) {
    auto made = std::make_unique<FaultyTier>(tier, 7);
    faulty = made.get();
    return made;
  };
}

class EngineFaultsTest : public testing::Test {
 protected:
  const Tokens tokens_{.geometry = SmallGeometry()};
};

TEST_F(EngineFaultsTest, PagesFoundDamagedInHostMemoryAreCountedAndNeverUsed) {
  FaultyTier* host = nullptr;
  EngineStand stand({.wrap_host = MadeFaulty(host)});
  host->Set({.flipped = 1});
  Worker worker(stand.engine(), tokens_, "a");
  worker.open = {.policy = "streaming", .recall = "exact", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(worker.Open().status());
  for (int32_t first = 0; first < 128; first += 32) {
    ASSERT_OK(worker.StepAllLayers({.first = first, .count = 32, .phase = Phase::kPrefill}).status);
    stand.Settle();
  }
  ASSERT_GT(host->damaged_records(), 0U);

  uint64_t not_met = 0;
  uint64_t lost = 0;
  for (int layer = 0; layer < tokens_.geometry.layers; ++layer) {
    const StepAnswer answer = worker.Step({.layer = layer, .first = 128});
    ASSERT_OK(answer.status);
    EXPECT_EQ(ErrorsOf(answer, tokens_, layer, 128, 1).violations, 0);
    not_met += answer.certificate.met[0] == 0 ? 1 : 0;
    lost += answer.lost.size();
    for (const LostPage& page : answer.lost) {
      EXPECT_EQ(page.reason(), "CORRUPT_PAGE");
      EXPECT_EQ(page.tier, TierName::kHost);
    }
    const StepAnswer again = worker.Step({.layer = layer, .first = 128, .appends = false});
    EXPECT_EQ(again.lost, answer.lost);
    not_met += again.certificate.met[0] == 0 ? 1 : 0;
  }

  const absl::Status required =
      worker.Step({.layer = 1, .first = 128, .appends = false, .require_met = true}).status;
  EXPECT_EQ(required.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(required.message()), HasSubstr("a page is lost"));
  ++not_met;

  EXPECT_GT(not_met, 0U);
  const Stats stats = stand.engine().GetStats();
  EXPECT_GT(stats.tiers[1].corrupt_pages, 0U);
  EXPECT_EQ(stats.answers_not_met.at("CORRUPT_PAGE"), not_met);
  EXPECT_GT(lost, 0U);
  EXPECT_EQ(stats.pages_lost.at("CORRUPT_PAGE"),
            lost);  // Each once, however often it is asked for.
}

TEST_F(EngineFaultsTest, PagesThatNoTierHoldsAreNamed) {
  FaultyTier* host = nullptr;
  EngineStand stand({.wrap_host = MadeFaulty(host)});
  Worker worker(stand.engine(), tokens_, "a");
  worker.open = {.policy = "streaming", .recall = "exact", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(worker.Open().status());
  for (int32_t first = 0; first < 160; first += 32) {
    ASSERT_OK(worker.StepAllLayers({.first = first, .count = 32, .phase = Phase::kPrefill}).status);
    stand.Settle();
  }
  const storage::BlockKey key{.sequence = 1, .block = 2};
  ASSERT_NE(host->Pin(key), nullptr);
  ASSERT_OK(host->Erase({&key, 1}));

  const StepAnswer answer = worker.Step({.first = 160});

  ASSERT_OK(answer.status);
  EXPECT_EQ(answer.certificate.not_met_reason, "MISSING_PAGE");
  EXPECT_EQ(ErrorsOf(answer, tokens_, 0, 160, 1).violations, 0);
  EXPECT_THAT(answer.lost, ElementsAre(LostPage{.kv_head = 0, .first_index = 32, .tokens = 16},
                                       LostPage{.kv_head = 1, .first_index = 32, .tokens = 16}));
  EXPECT_EQ(stand.engine().GetStats().pages_lost.at("MISSING_PAGE"), 2U);
}

TEST_F(EngineFaultsTest, AHungDiskCostsAnswersTheirPagesAndNobodyTheirLife) {
  absl::Notification disk_answers;
  FaultyTier* disk = nullptr;
  EngineStand stand({.host_bytes = 260 << 10,
                     .rocksdb_bytes = 192 << 20,
                     .wrap_rocksdb = [&](storage::Tier& tier) {
                       return std::make_unique<storage::PatientTier>(
                           MadeFaulty(disk)(tier),
                           storage::Patience{.limit = absl::Milliseconds(20)});
                     }});
  Worker worker(stand.engine(), tokens_, "a");
  worker.open = {.policy = "streaming", .recall = "exact", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(worker.Open().status());
  for (int32_t first = 0; first < 256; first += 32) {
    ASSERT_OK(worker.StepAllLayers({.first = first, .count = 32, .phase = Phase::kPrefill}).status);
  }
  stand.Settle();
  ASSERT_TRUE(ComesUnderItsWatermark(stand));
  ASSERT_GT(stand.engine().GetStats().tiers[2].blocks, 0U);
  const absl::Cleanup let_go = [&] {  // A test that fails must not hang.
    if (!disk_answers.HasBeenNotified()) disk_answers.Notify();
  };
  disk->Set({.delay = 1, .on_delay = [&] { disk_answers.WaitForNotification(); }});

  const StepAnswer without = worker.Step({.first = 256});

  ASSERT_OK(without.status);
  EXPECT_EQ(without.certificate.met[0], 0);
  EXPECT_EQ(without.certificate.not_met_reason, "TIER_UNAVAILABLE");
  EXPECT_EQ(ErrorsOf(without, tokens_, 0, 256, 1).violations, 0);
  const absl::Status required =
      worker.Step({.first = 256, .appends = false, .require_met = true}).status;
  EXPECT_THAT(required, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("ask again")));
  EXPECT_EQ(ReasonOf(required), "NOT_MET");
  EXPECT_THAT(stand.engine().ReadPages({.sequence = "a"}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("rocksdb tier")));

  disk->Set({});
  disk_answers.Notify();
  StepAnswer with = worker.Step({.layer = 1, .first = 256});
  EXPECT_TRUE(ComesTrue([&] {
    if (!with.status.ok() || with.certificate.met[0] != 0) return true;
    with = worker.Step({.layer = 1, .first = 256, .appends = false});
    return false;
  }));
  ASSERT_OK(with.status);
  EXPECT_LT(ErrorsOf(with, tokens_, 1, 256, 1).relative, 1e-5);
}

// Not at the disk's deadline but at its own.
TEST_F(EngineFaultsTest, ACallInAHurryIsAnsweredInTimeByADiskThatIsNot) {
  absl::Notification disk_answers;
  FaultyTier* disk = nullptr;
  EngineStand stand({.host_bytes = 260 << 10,
                     .rocksdb_bytes = 192 << 20,
                     .wrap_rocksdb = [&](storage::Tier& tier) {
                       return std::make_unique<storage::PatientTier>(
                           MadeFaulty(disk)(tier), storage::Patience{.limit = absl::Minutes(5)});
                     }});
  Worker worker(stand.engine(), tokens_, "a");
  worker.open = {.policy = "streaming", .recall = "exact", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(worker.Open().status());
  for (int32_t first = 0; first < 256; first += 32) {
    ASSERT_OK(worker.StepAllLayers({.first = first, .count = 32, .phase = Phase::kPrefill}).status);
  }
  stand.Settle();
  ASSERT_TRUE(ComesUnderItsWatermark(stand));
  const absl::Cleanup let_go = [&] {
    if (!disk_answers.HasBeenNotified()) disk_answers.Notify();
  };
  disk->Set({.delay = 1, .on_delay = [&] { disk_answers.WaitForNotification(); }});

  const StepAnswer answer = worker.Step({.first = 256, .patience = absl::Milliseconds(200)});
  const absl::Status pages =
      stand.engine()
          .ReadPages(
              {.sequence = "a", .deadline = stand.clock().SinceStart() + absl::Milliseconds(20)})
          .status();

  ASSERT_OK(answer.status);
  EXPECT_EQ(answer.certificate.met[0], 0);
  EXPECT_EQ(answer.certificate.not_met_reason, "DEADLINE");
  EXPECT_EQ(ErrorsOf(answer, tokens_, 0, 256, 1).violations, 0);
  EXPECT_EQ(ReasonOf(pages), "OUT_OF_TIME");

  disk->Set({});
  disk_answers.Notify();
  EXPECT_OK(stand.engine().ReadPages({.sequence = "a"}).status());
}

// Not at its deadline, with a word of the disk.
TEST_F(EngineFaultsTest, TokensThatCannotLeaveForATierThatIsIllAreRefusedSoon) {
  FaultyTier* host = nullptr;
  FaultyTier* disk = nullptr;
  test::FakeClock clock;
  EngineStand stand({.rocksdb_bytes = 192 << 20,
                     .clock = &clock,
                     .wrap_host = MadeFaulty(host),
                     .wrap_rocksdb = MadeFaulty(disk)});
  Worker worker(stand.engine(), tokens_, "a", clock);
  worker.open = {.policy = "streaming", .recall = "off", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(worker.Open().status());
  host->Set({.full = 1});
  disk->Set({.refuse = 1});
  std::atomic<bool> is_over = false;
  std::thread time([&] {
    while (!is_over) {
      clock.Advance(absl::Milliseconds(10));
      stand.engine().CloseIdle();
    }
  });
  const absl::Cleanup end = [&] {
    is_over = true;
    time.join();
  };

  absl::Status status;
  for (int32_t first = 0; first < 512 && status.ok(); first += 32) {
    status = worker
                 .StepAllLayers({.first = first,
                                 .count = 32,
                                 .phase = Phase::kPrefill,
                                 .patience = absl::Hours(1000)})
                 .status;
  }

  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("faulty tier: ")));
  EXPECT_EQ(ReasonOf(status), "TIER_UNAVAILABLE");
}

TEST_F(EngineFaultsTest, CallsThatFindNoStagingSaySo) {
  absl::Notification disk_answers;
  std::atomic<int> waiting = 0;
  FaultyTier* disk = nullptr;
  EngineStand stand(
      {.host_bytes = 320 << 10, .rocksdb_bytes = 192 << 20, .wrap_rocksdb = MadeFaulty(disk)});
  std::vector<Worker> workers;
  for (const char* name : {"c", "a", "b"}) {
    Worker& worker = workers.emplace_back(stand.engine(), tokens_, name);
    worker.open = {
        .policy = "streaming", .recall = "exact", .budget_tokens = 48, .chunk_tokens = 40};
    ASSERT_OK(worker.Open().status());
    for (int32_t first = 0; first < 200; first += 40) {
      ASSERT_OK(
          worker.StepAllLayers({.first = first, .count = 40, .phase = Phase::kPrefill}).status);
    }
  }
  stand.Settle();
  ASSERT_TRUE(ComesUnderItsWatermark(stand));
  ASSERT_GT(stand.engine().GetStats().tiers[2].blocks, 26U);  // Some of the last one's too.
  disk->Set({.delay = 1, .on_delay = [&] {
               ++waiting;
               disk_answers.WaitForNotification();
             }});
  std::vector<std::thread> readers;
  const absl::Cleanup end = [&] {
    disk_answers.Notify();
    for (std::thread& reader : readers) reader.join();
  };
  for (const uint32_t layer : {0U, 1U}) {
    for (const char* name : {"a", "b"}) {
      readers.emplace_back([&stand, layer, name] {
        EXPECT_OK(stand.engine().ReadPages({.sequence = name, .layer = layer}).status());
      });
    }
  }
  ASSERT_TRUE(ComesTrue([&] { return waiting >= Staging::kShares; }));

  const StepAnswer answer =
      workers.front().Step({.first = 200, .patience = absl::Milliseconds(40)});

  ASSERT_OK(answer.status);
  EXPECT_EQ(answer.certificate.met[0], 0);
  EXPECT_EQ(answer.certificate.not_met_reason, "STAGING_BUSY");
  EXPECT_EQ(ErrorsOf(answer, tokens_, 0, 200, 1).violations, 0);
  const auto pages = stand.engine().ReadPages(
      {.sequence = "c", .deadline = stand.clock().SinceStart() + absl::Milliseconds(20)});
  EXPECT_EQ(pages.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(pages.status()), "STAGING_BUSY");
}

// An engine whose device fails as told.
struct FailingDevice {
  FaultyBackend* device = nullptr;
  EngineSetup Setup() {
    return {.wrap_backend = [this](gpu::Backend& backend) {
      auto faulty = std::make_unique<FaultyBackend>(backend);
      device = faulty.get();
      return faulty;
    }};
  }
};

// A twin that never met the fault has the same bytes and the same residents in the end.
TEST_F(EngineFaultsTest, ADeviceThatFailsInAnyPartOfACallLeavesTheSequenceAsItWas) {
  const std::vector<std::function<bool(const gpu::Batch&)>> faults = {
      &FaultyBackend::Is<gpu::AppendArgs>, &FaultyBackend::Is<gpu::DigestArgs>,
      &FaultyBackend::Is<gpu::WeightedValueArgs>, &FaultyBackend::Is<gpu::DamageArgs>};
  for (size_t f = 0; f < faults.size(); ++f) {
    EngineStand twin_stand;
    FailingDevice failing;
    EngineStand stand(failing.Setup());
    Worker twin(twin_stand.engine(), tokens_, "a");
    Worker worker(stand.engine(), tokens_, "a");
    twin.open = worker.open = {
        .policy = "h2o+caote", .recall = "exact", .budget_tokens = 48, .chunk_tokens = 32};
    ASSERT_OK(twin.Open().status());
    ASSERT_OK(worker.Open().status());
    int refused = 0;
    for (int32_t step = 0; step < 16; ++step) {
      const Worker::Call call = {
          .layer = step % 2, .first = step / 2 * 20, .count = 20, .phase = Phase::kPrefill};
      ASSERT_OK(twin.Step(call).status);
      failing.device->Fail(faults[f]);
      const StepAnswer failed = worker.Step(call);
      failing.device->Heal();
      stand.engine().CheckInvariants();
      if (failed.status.ok()) continue;  // It had no need of the batch.
      ++refused;
      EXPECT_EQ(failed.status.code(), absl::StatusCode::kUnavailable) << failed.status;
      ASSERT_OK(worker.Step(call).status);
    }
    EXPECT_GT(refused, 2) << "fault " << f;
    twin_stand.Settle();
    stand.Settle();
    EXPECT_EQ(stand.host_budget().used_bytes(), twin_stand.host_budget().used_bytes());
    EXPECT_EQ(stand.engine().GetStats().tokens_appended,
              twin_stand.engine().GetStats().tokens_appended);
    for (uint32_t layer = 0; layer < 2; ++layer) {
      EXPECT_EQ(ResidentsOf(stand.engine(), layer), ResidentsOf(twin_stand.engine(), layer)) << f;
      EXPECT_EQ(BytesOf(stand.engine(), layer), BytesOf(twin_stand.engine(), layer)) << f;
    }
  }
}

TEST_F(EngineFaultsTest, FramesThatCouldNotBeZeroedAreGivenToNobody) {
  FailingDevice failing;
  EngineSetup setup = failing.Setup();
  setup.device_bytes = 80 << 10;
  EngineStand stand(setup);
  Worker first(stand.engine(), tokens_, "first");
  Worker second(stand.engine(), tokens_, "second");
  first.open = second.open = {.policy = "streaming", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(first.Open().status());
  failing.device->Fail(&FaultyBackend::Is<gpu::ZeroArgs>);

  ASSERT_OK(stand.engine().CloseSequence("first"));

  EXPECT_THAT(second.Open(), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("second")));
  failing.device->Heal();
  // Whenever blocks are carried, it is tried again.
  ASSERT_TRUE(ComesTrue([&] {
    stand.engine().CloseIdle();
    return stand.engine().GetStats().tiers[0].used_bytes == 0;
  }));
  EXPECT_OK(second.Open());
}

TEST_F(EngineFaultsTest, AnAnswerThatTheDeviceFailsIsCountedAndObservedWhenItIsAskedForAgain) {
  EngineStand twin_stand;
  FailingDevice failing;
  EngineStand stand(failing.Setup());
  Worker twin(twin_stand.engine(), tokens_, "a");
  Worker worker(stand.engine(), tokens_, "a");
  twin.open =
      worker.open = {.policy = "h2o", .recall = "exact", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(twin.Open().status());
  ASSERT_OK(worker.Open().status());
  for (int32_t first = 0; first < 160; first += 20) {
    const Worker::Call call = {.first = first, .count = 20, .phase = Phase::kPrefill};
    ASSERT_OK(twin.StepAllLayers(call).status);
    failing.device->Fail(&FaultyBackend::Is<gpu::AttendArgs>);
    const StepAnswer failed = worker.Step(call);
    failing.device->Heal();

    EXPECT_EQ(service::ReasonOf(failed.status), "DEVICE_LOST");
    EXPECT_EQ(failed.length, static_cast<uint64_t>(first) + 20);  // They stay appended.
    ASSERT_OK(worker.StepAllLayers(call).status);
  }

  EXPECT_EQ(stand.engine().GetStats().refused.at("DEVICE_LOST"), 8U);
  EXPECT_TRUE(stand.engine().is_device_lost());
  for (uint32_t layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(ResidentsOf(stand.engine(), layer), ResidentsOf(twin_stand.engine(), layer));
  }
}

// Of pages that nobody has sealed yet, the device has the only copy.
TEST_F(EngineFaultsTest, PagesThatTheDeviceDoesNotGatherFailTheCallAsTheDeviceDoes) {
  FailingDevice failing;
  test::SteppedExecutor carriers;
  EngineSetup setup = failing.Setup();
  setup.carriers = &carriers;
  EngineStand stand(setup);
  Worker worker(stand.engine(), tokens_, "a");
  worker.open = {.policy = "streaming", .recall = "exact", .budget_tokens = 36, .chunk_tokens = 44};
  ASSERT_OK(worker.Open().status());
  ASSERT_OK(worker.StepAllLayers({.count = 44, .phase = Phase::kPrefill}).status);
  failing.device->Fail(&FaultyBackend::Is<gpu::GatherArgs>);

  const StepAnswer answer = worker.Step({.first = 44});
  const absl::Status pages = stand.engine().ReadPages({.sequence = "a"}).status();

  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(answer.status), "DEVICE_LOST");
  EXPECT_EQ(pages.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(pages), "DEVICE_LOST");
  EXPECT_EQ(stand.engine().GetStats().refused.at("DEVICE_LOST"), 2U);
}

// A call that ends in an exception holds its layer no longer.
TEST_F(EngineFaultsTest, MemoryThatRunsOutInACallLeavesTheSequenceAsItWas) {
  FailingDevice failing;
  EngineStand stand(failing.Setup());
  Worker worker(stand.engine(), tokens_, "a");
  worker.open = {.policy = "h2o+caote", .recall = "exact", .budget_tokens = 48, .chunk_tokens = 32};
  ASSERT_OK(worker.Open().status());
  ASSERT_OK(worker.StepAllLayers({.first = 0, .count = 32, .phase = Phase::kPrefill}).status);
  ASSERT_OK(worker.StepAllLayers({.first = 32, .count = 32, .phase = Phase::kPrefill}).status);
  const Worker::Call call = {.first = 64, .count = 20, .phase = Phase::kPrefill};
  stand.Settle();
  const uint64_t used = stand.host_budget().used_bytes();
  for (const auto& runs_out :
       {&FaultyBackend::Is<gpu::DamageArgs>, &FaultyBackend::Is<gpu::AppendArgs>,
        &FaultyBackend::Is<gpu::AttendArgs>}) {
    failing.device->Fail([&](const gpu::Batch& batch) {
      if (runs_out(batch)) throw std::bad_alloc();
      return false;
    });
    EXPECT_THROW(worker.Step(call), std::bad_alloc);
    stand.engine().CheckInvariants();
  }
  failing.device->Heal();
  EXPECT_EQ(stand.host_budget().used_bytes(), used);

  const StepAnswer answer = worker.StepAllLayers(call);
  ASSERT_OK(answer.status);
  EXPECT_EQ(answer.length, 84U);
  EXPECT_FALSE(answer.replayed);
}

}  // namespace
}  // namespace ebbtide::service
