// SPDX-License-Identifier: Apache-2.0

#include "service/movement/page_source.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/kernels/codes.h"
#include "tests/support/faulty_backend.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/service/cache_stand.h"

namespace ebbtide::service {
namespace {

using storage::PagePart;
using test::CacheStand;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kLayer = 1;

std::vector<std::byte> Copy(std::span<const std::byte> bytes) {
  return {bytes.begin(), bytes.end()};
}

// Four complete blocks and the beginning of a fifth, all in slots until the test carries them.
class PageSourceTest : public testing::Test {
 protected:
  PageSourceTest() : sequence_(stand_.Open("a")) { stand_.Append("a", 0, 70); }

  std::unique_ptr<PageSource> MakeSource(bool has_below = true) {
    LowerTiers tiers = stand_.tiers();
    return std::make_unique<PageSource>(
        stand_.cache(),
        has_below ? tiers : LowerTiers{.host = tiers.host, .host_budget = tiers.host_budget},
        staging_, device_, service::Ticket{.sequence = sequence_, .layer = kLayer});
  }

  // Block `block` goes to the tier below, as the mover takes it there.
  void MoveDown(int32_t block) {
    ASSERT_EQ(stand_.cache().PlanMoveDown()->block, block);
    const CarryPlan plan{.sequence = sequence_, .block = block, .key = sequence_->facts.key(block)};
    const storage::BlockPin pin = stand_.host().Pin(plan.key);
    const storage::BlockWrite write{.key = plan.key, .record = *pin};
    ASSERT_OK(stand_.below().Write({&write, 1}));
    stand_.cache().CommitMoveDown(plan, CarryOutcome::kMoved);
    ASSERT_OK(stand_.host().Erase({&plan.key, 1}));
  }

  static PageRequest Fetch(PageSource& source, PageRequest request) {
    source.Fetch({&request, 1}, absl::Seconds(10));
    return request;
  }

  CacheStand stand_{{.below_blocks = 100}};
  Staging staging_{1 << 20};
  gpu::Device device_ = *gpu::Device::Open(stand_.backend());
  SequenceRef sequence_;
};

TEST_F(PageSourceTest, PartsHaveTheirRecordsSizes) {
  const auto source = MakeSource();
  const gpu::PageShape shape = stand_.tokens().geometry.page_shape();

  EXPECT_EQ(source->bytes_of(PagePart::kExact), shape.page_bytes());
  EXPECT_EQ(source->bytes_of(PagePart::kCoarse), gpu::CoarseBytes(shape));
  EXPECT_EQ(source->bytes_of(PagePart::kFine), gpu::FineBytes(shape));
  EXPECT_EQ(source->group_bytes(), (1U << 20) / Staging::kShares);
}

TEST_F(PageSourceTest, PageInTheHostTierIsReadInPlace) {
  stand_.Carry();
  const auto source = MakeSource();

  const PageRequest request = Fetch(*source, {.kv_head = 1, .page = 2});

  EXPECT_EQ(request.state, FetchState::kOk);
  EXPECT_EQ(request.tier, TierName::kHost);
  EXPECT_EQ(Copy(request.bytes), stand_.Page(kLayer, 1, 2));
  const storage::BlockPin record = stand_.host().Pin(sequence_->facts.key(2));
  EXPECT_GE(request.bytes.data(), record->data());
  EXPECT_LE(request.bytes.data() + request.bytes.size(), record->data() + record->size());
}

TEST_F(PageSourceTest, EveryLaneHasItsOwnPage) {
  stand_.Carry();
  const auto source = MakeSource();
  std::vector<PageRequest> requests;
  for (int32_t page = 0; page < 4; ++page) {
    for (int head = 0; head < 2; ++head) requests.push_back({.kv_head = head, .page = page});
  }

  source->Fetch(requests, absl::Seconds(10));

  for (const PageRequest& request : requests) {
    ASSERT_EQ(request.state, FetchState::kOk);
    EXPECT_EQ(Copy(request.bytes), stand_.Page(kLayer, request.kv_head, request.page));
  }
}

TEST_F(PageSourceTest, CodesAreTheirPartsOfTheRecord) {
  stand_.Carry();
  const Model& model = *sequence_->model;
  const storage::RecordGeometry geometry = model.geometry.record(model.fingerprint);
  const storage::BlockPin record = stand_.host().Pin(sequence_->facts.key(0));
  const uint32_t page = kLayer * 2 + 1;
  const auto from_host = MakeSource();
  MoveDown(0);
  const auto from_below = MakeSource();
  for (const PagePart part : {PagePart::kCoarse, PagePart::kFine}) {
    const auto bytes = record->subspan(geometry.part_offset(page, part), geometry.part_bytes(part));

    const PageRequest staged = Fetch(*from_below, {.kv_head = 1, .page = 0, .part = part});

    EXPECT_EQ(staged.state, FetchState::kOk);
    EXPECT_EQ(staged.part, part);
    EXPECT_EQ(Copy(staged.bytes), Copy(bytes));
    EXPECT_EQ(Fetch(*from_host, {.kv_head = 1, .page = 1, .part = part}).state, FetchState::kOk);
  }
}

TEST_F(PageSourceTest, PageBelowIsStaged) {
  stand_.Carry();
  MoveDown(0);
  const auto source = MakeSource();

  const PageRequest request = Fetch(*source, {.kv_head = 0, .page = 0});

  EXPECT_EQ(request.state, FetchState::kOk);
  EXPECT_EQ(request.tier, TierName::kRocksdb);
  EXPECT_EQ(Copy(request.bytes), stand_.Page(kLayer, 0, 0));
}

TEST_F(PageSourceTest, PageWithoutACopyBelowIsGatheredFromItsSlots) {
  stand_.Append("a", 70, 1, {35, 37, 50});  // Demoted, but their blocks are not sealed.
  const auto source = MakeSource();

  const PageRequest request = Fetch(*source, {.kv_head = 1, .page = 2});

  EXPECT_EQ(request.state, FetchState::kOk);
  EXPECT_EQ(request.tier, TierName::kDevice);
  EXPECT_EQ(Copy(request.bytes), stand_.Page(kLayer, 1, 2));
}

// Otherwise answers, and by them scores, would depend on when a carrier comes by.
TEST_F(PageSourceTest, EveryPartIsTheSameBeforeItsBlockIsSealedAndAfter) {
  const auto source = MakeSource();
  std::vector<std::vector<std::byte>> before_seal;
  for (const PagePart part : {PagePart::kExact, PagePart::kCoarse, PagePart::kFine}) {
    const PageRequest request = Fetch(*source, {.kv_head = 1, .page = 0, .part = part});
    EXPECT_EQ(request.tier, TierName::kDevice);
    EXPECT_EQ(request.part, part);
    before_seal.push_back(Copy(request.bytes));
  }

  stand_.Carry();

  size_t next = 0;
  for (const PagePart part : {PagePart::kExact, PagePart::kCoarse, PagePart::kFine}) {
    const PageRequest request = Fetch(*source, {.kv_head = 1, .page = 0, .part = part});
    EXPECT_EQ(request.tier, TierName::kHost);
    EXPECT_EQ(Copy(request.bytes), before_seal[next++]);
  }
}

TEST_F(PageSourceTest, OneFetchReachesEveryTier) {
  stand_.Carry();
  MoveDown(0);
  stand_.Append("a", 70, 10);  // Completes block 4, which nobody carries.
  const auto source = MakeSource();
  std::vector<PageRequest> requests = {{.kv_head = 0, .page = 4},
                                       {.kv_head = 1, .page = 0},
                                       {.kv_head = 0, .page = 2},
                                       {.kv_head = 0, .page = 0}};

  source->Fetch(requests, absl::Seconds(10));

  const std::vector<TierName> tiers = {TierName::kDevice, TierName::kRocksdb, TierName::kHost,
                                       TierName::kRocksdb};
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(requests[i].state, FetchState::kOk);
    EXPECT_EQ(requests[i].tier, tiers[i]) << i;
    EXPECT_EQ(Copy(requests[i].bytes), stand_.Page(kLayer, requests[i].kv_head, requests[i].page));
  }
}

TEST_F(PageSourceTest, EveryDamagedPartIsCorruptAndNoOther) {
  stand_.host().Set({.flipped = 1});  // One bit of each record's parts.
  stand_.Carry();
  int corrupt = 0;
  int sound = 0;
  for (int layer = 0; layer < 2; ++layer) {
    PageSource source(stand_.cache(), stand_.tiers(), staging_, device_,
                      {.sequence = sequence_, .layer = layer});
    for (int32_t page = 0; page < 4; ++page) {
      for (int head = 0; head < 2; ++head) {
        for (const PagePart part : {PagePart::kExact, PagePart::kCoarse, PagePart::kFine}) {
          const PageRequest request = Fetch(source, {.kv_head = head, .page = page, .part = part});
          EXPECT_EQ(request.tier, TierName::kHost);
          if (request.state == FetchState::kCorrupt) {
            EXPECT_THAT(request.bytes, IsEmpty());
            ++corrupt;
          } else {
            EXPECT_EQ(request.state, FetchState::kOk);
            ++sound;
          }
        }
      }
    }
  }
  EXPECT_EQ(corrupt, 4);  // Of each block, the part that the bit is in.
  EXPECT_EQ(sound, 4 * 2 * 2 * 3 - 4);
}

TEST_F(PageSourceTest, RecordWithADamagedHeaderIsCorrupt) {
  stand_.Carry();
  const storage::BlockPin record = stand_.host().Pin(sequence_->facts.key(1));
  // The memory is the host tier's own and writable; a stray write hits it.
  const_cast<std::byte&>((*record)[40]) ^= std::byte{1};
  const auto source = MakeSource();

  const PageRequest request = Fetch(*source, {.kv_head = 0, .page = 1});

  EXPECT_EQ(request.state, FetchState::kCorrupt);
  EXPECT_EQ(request.tier, TierName::kHost);
  EXPECT_THAT(request.bytes, IsEmpty());
  EXPECT_EQ(Fetch(*source, {.kv_head = 0, .page = 2}).state, FetchState::kOk);
}

TEST_F(PageSourceTest, DamageBelowIsCorruptAndHandsOutNothing) {
  stand_.Carry();
  stand_.below().Set({.torn = 1});
  MoveDown(0);
  stand_.below().Set({});
  const auto source = MakeSource();
  int corrupt = 0;
  for (const PagePart part : {PagePart::kExact, PagePart::kCoarse, PagePart::kFine}) {
    const PageRequest request = Fetch(*source, {.kv_head = 1, .page = 0, .part = part});
    if (request.state != FetchState::kCorrupt) continue;
    ++corrupt;
    EXPECT_EQ(request.tier, TierName::kRocksdb);
    EXPECT_THAT(request.bytes, IsEmpty());
  }
  EXPECT_GE(corrupt, 1);  // The last lane's fine codes end the record: torn, whatever the seed.
}

TEST_F(PageSourceTest, TierThatDoesNotAnswerIsUnavailableForNow) {
  stand_.Carry();
  MoveDown(0);
  const auto source = MakeSource();
  std::vector<PageRequest> requests = {{.kv_head = 0, .page = 0}, {.kv_head = 0, .page = 1}};

  stand_.below().Set({.refuse = 1});
  source->Fetch(requests, absl::Seconds(10));

  EXPECT_EQ(requests[0].state, FetchState::kUnavailable);
  EXPECT_EQ(requests[0].tier, TierName::kRocksdb);
  EXPECT_THAT(requests[0].bytes, IsEmpty());
  EXPECT_EQ(requests[1].state, FetchState::kOk);  // The host tier's is not held up.
  stand_.below().Set({});
  source->Fetch(requests, absl::Seconds(10));
  EXPECT_EQ(requests[0].state, FetchState::kOk);
}

TEST_F(PageSourceTest, BlockThatNoTierHoldsIsMissing) {
  stand_.Carry();
  const storage::BlockKey key = sequence_->facts.key(0);
  ASSERT_OK(stand_.host().Erase({&key, 1}));

  for (const bool has_below : {true, false}) {
    const auto source = MakeSource(has_below);
    const PageRequest request = Fetch(*source, {.kv_head = 0, .page = 0});

    EXPECT_EQ(request.state, FetchState::kMissing) << has_below;
    EXPECT_THAT(request.bytes, IsEmpty()) << has_below;
  }
}

TEST_F(PageSourceTest, BlockThatMovedDownSinceItsPlaceWasAskedIsFound) {
  stand_.Carry();
  const storage::BlockKey key = sequence_->facts.key(0);
  const storage::BlockPin pin = stand_.host().Pin(key);
  const storage::BlockWrite write{.key = key, .record = *pin};
  ASSERT_OK(stand_.below().Write({&write, 1}));
  ASSERT_OK(stand_.host().Erase({&key, 1}));  // The cache still says: host.
  const auto source = MakeSource();

  const PageRequest request = Fetch(*source, {.kv_head = 1, .page = 0});

  EXPECT_EQ(request.state, FetchState::kOk);
  EXPECT_EQ(request.tier, TierName::kRocksdb);
  EXPECT_EQ(Copy(request.bytes), stand_.Page(kLayer, 1, 0));
}

TEST_F(PageSourceTest, BytesInPlaceOutliveTheirBlockUntilTheNextFetch) {
  stand_.Carry();
  const auto source = MakeSource();
  const PageRequest request = Fetch(*source, {.kv_head = 0, .page = 0});
  const storage::BlockKey key = sequence_->facts.key(0);
  const uint64_t used_bytes = stand_.host_budget().used_bytes();

  ASSERT_OK(stand_.host().Erase({&key, 1}));

  EXPECT_EQ(Copy(request.bytes), stand_.Page(kLayer, 0, 0));
  EXPECT_EQ(stand_.host_budget().used_bytes(), used_bytes);  // Pinned memory stays charged.
  Fetch(*source, {.kv_head = 0, .page = 1});
  EXPECT_EQ(stand_.host_budget().used_bytes(), used_bytes - stand_.host_cost());
}

TEST_F(PageSourceTest, NobodyWaitsForStagingPastTheirPatience) {
  const auto source = MakeSource();
  for (int i = 0; i < Staging::kShares; ++i) {
    ASSERT_TRUE(staging_.TakeShare(absl::ZeroDuration()));
  }
  PageRequest request{.kv_head = 1, .page = 2};

  source->Fetch({&request, 1}, absl::Milliseconds(1));

  EXPECT_EQ(request.state, FetchState::kNoStaging);
  EXPECT_THAT(request.bytes, IsEmpty());
  for (int i = 0; i < Staging::kShares; ++i) staging_.GiveShare();
  source->Fetch({&request, 1}, absl::ZeroDuration());
  EXPECT_EQ(request.state, FetchState::kOk);
}

TEST_F(PageSourceTest, PageBelowThatFindsNoStagingIsNotItsTiersFault) {
  stand_.Carry();
  MoveDown(0);
  const auto source = MakeSource();
  for (int i = 0; i < Staging::kShares; ++i) {
    ASSERT_TRUE(staging_.TakeShare(absl::ZeroDuration()));
  }
  PageRequest request{.kv_head = 1, .page = 0};

  source->Fetch({&request, 1}, absl::Milliseconds(1));

  EXPECT_EQ(request.state, FetchState::kNoStaging);
  EXPECT_EQ(request.tier, TierName::kRocksdb);
  EXPECT_THAT(request.bytes, IsEmpty());
}

TEST_F(PageSourceTest, PageThatTheDeviceDoesNotGatherSaysWhy) {
  test::FaultyBackend backend(stand_.backend());
  backend.Fail(&test::FaultyBackend::Is<gpu::GatherArgs>);
  const gpu::Device device = *gpu::Device::Open(backend);
  PageSource source(stand_.cache(), stand_.tiers(), staging_, device,
                    {.sequence = sequence_, .layer = kLayer});

  const PageRequest request = Fetch(source, {.kv_head = 1, .page = 2});

  EXPECT_EQ(request.state, FetchState::kDeviceFailed);
  EXPECT_THAT(request.bytes, IsEmpty());
  EXPECT_THAT(source.status(), test::StatusIs(absl::StatusCode::kUnavailable, HasSubstr("device")));
}

TEST_F(PageSourceTest, PageInTheHostNeedsNoShareOfTheStaging) {
  stand_.Carry();
  const auto source = MakeSource();
  for (int i = 0; i < Staging::kShares; ++i) {
    ASSERT_TRUE(staging_.TakeShare(absl::ZeroDuration()));
  }
  PageRequest request{.kv_head = 1, .page = 1};

  source->Fetch({&request, 1}, absl::ZeroDuration());

  EXPECT_EQ(request.state, FetchState::kOk);
}

TEST_F(PageSourceTest, ShareIsGivenBackWithTheBytes) {
  const auto source = MakeSource();
  Fetch(*source, {.kv_head = 0, .page = 0});
  for (int i = 1; i < Staging::kShares; ++i) ASSERT_TRUE(staging_.TakeShare(absl::ZeroDuration()));
  ASSERT_FALSE(staging_.TakeShare(absl::ZeroDuration()));

  source->GiveUp();

  EXPECT_TRUE(staging_.TakeShare(absl::ZeroDuration()));
}

TEST_F(PageSourceTest, SourceHoldsOneShareOfStagingWhileItHoldsBytes) {
  std::vector<std::unique_ptr<PageSource>> sources;
  for (int i = 0; i < Staging::kShares; ++i) {
    sources.push_back(MakeSource());
    Fetch(*sources.back(), {.kv_head = 0, .page = 0});
    Fetch(*sources.back(), {.kv_head = 0, .page = 1});
  }
  const auto unused = MakeSource();  // Takes nothing before its first fetch.
  std::atomic<bool> is_given_back = false;
  std::thread waiting([&] {
    const auto another = MakeSource();
    Fetch(*another, {.kv_head = 0, .page = 0});
    EXPECT_TRUE(is_given_back);
  });

  is_given_back = true;
  sources.pop_back();

  waiting.join();
  for (int i = 0; i + 1 < Staging::kShares; ++i) sources.pop_back();
  for (int i = 0; i < Staging::kShares; ++i)
    EXPECT_TRUE(staging_.TakeShare(absl::ZeroDuration()));  // All are back.
}

}  // namespace
}  // namespace ebbtide::service
