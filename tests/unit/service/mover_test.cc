// SPDX-License-Identifier: Apache-2.0

#include "service/movement/mover.h"

#include <algorithm>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/kernels/codes.h"
#include "gpu/kernels/digest.h"
#include "service/reason.h"
#include "storage/block_record.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/service/cache_stand.h"

namespace ebbtide::service {
namespace {

using storage::PagePart;
using test::CacheStand;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int32_t kPage = 16;
constexpr TierName kHost = TierName::kHost;
constexpr TierName kBelow = TierName::kRocksdb;

std::vector<std::byte> Copy(std::span<const std::byte> bytes) {
  return {bytes.begin(), bytes.end()};
}

// Where each block of `sequence` lies, kDevice where it is not sealed.
std::vector<TierName> Places(CacheStand& stand, const SequenceRef& sequence) {
  std::vector<TierName> places;
  for (const Block& block : stand.cache().Places(sequence)) {
    places.push_back(block.stage == BlockStage::kSealed ? block.tier : TierName::kDevice);
  }
  return places;
}

bool IsHeld(storage::Tier& tier, const storage::BlockKey& key) {
  std::vector<std::byte> bytes(test::SmallGeometry().page_shape().page_bytes());
  storage::PageRead read{.key = key, .page = 0, .into = bytes};
  return tier.Read({&read, 1}, absl::InfiniteDuration()).ok() &&
         read.state == storage::PageState::kOk;
}

bool IsZero(std::span<const std::byte> bytes) {
  return std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0}; });
}

// --- sealing

TEST(MoverTest, CompleteBlocksAreSealedIntoTheHostTier) {
  CacheStand stand;
  const SequenceRef sequence = stand.Open("a");
  stand.Append("a", 0, 2 * kPage + 3);

  stand.Carry();

  EXPECT_THAT(Places(stand, sequence), ElementsAre(kHost, kHost, TierName::kDevice));
  EXPECT_EQ(stand.host().Usage().blocks, 2U);
  EXPECT_FALSE(stand.cache().HasUnsealed());
  stand.cache().CheckInvariants();
}

TEST(MoverTest, RecordHoldsEveryLanesPageItsCodesAndThePositions) {
  CacheStand stand;
  const SequenceRef sequence = stand.Open("a", 64);
  stand.Append("a", 0, 3 * kPage);
  stand.Carry();
  stand.Append("a", 3 * kPage, kPage, {2, 3, 9});  // Their slots go to tokens of block 3.
  stand.Carry();
  stand.Append("a", 4 * kPage, kPage, {17, 31});

  stand.Carry();

  const Model& model = *sequence->model;
  const storage::RecordGeometry geometry = model.geometry.record(model.fingerprint);
  const gpu::PageShape shape = model.geometry.page_shape();
  for (int32_t block = 0; block < 5; ++block) {
    const storage::BlockPin record = stand.host().Pin(sequence->facts.key(block));
    ASSERT_NE(record, nullptr);
    ASSERT_OK_AND_ASSIGN(const storage::RecordHeader header, storage::ParseHeader(*record));
    EXPECT_EQ(header.key, sequence->facts.key(block));
    EXPECT_EQ(header.geometry, geometry);
    EXPECT_EQ(header.position(5), block * kPage + 5);
    for (uint32_t lane = 0; lane < geometry.pages(); ++lane) {
      const auto part = [&](PagePart which) {
        return record->subspan(geometry.part_offset(lane, which), geometry.part_bytes(which));
      };
      const std::vector<std::byte> page =
          stand.Page(static_cast<int>(lane) / 2, static_cast<int>(lane) % 2, block);
      std::vector<std::byte> digest(gpu::DigestBytes(shape.head_dim));
      std::vector<std::byte> coarse(gpu::CoarseBytes(shape));
      std::vector<std::byte> fine(gpu::FineBytes(shape));
      gpu::DigestCpu({.shape = shape, .tokens = kPage, .page = page, .digest = digest});
      gpu::EncodeCpu(
          {.shape = shape, .page = page, .digest = digest, .coarse = coarse, .fine = fine});

      EXPECT_EQ(Copy(part(PagePart::kExact)), page);
      EXPECT_EQ(Copy(part(PagePart::kCoarse)), coarse);
      EXPECT_EQ(Copy(part(PagePart::kFine)), fine);
      for (const PagePart which : {PagePart::kExact, PagePart::kCoarse, PagePart::kFine}) {
        EXPECT_TRUE(storage::PartIsIntact(header, lane, which, part(which)));
      }
    }
  }
}

TEST(MoverTest, KicksBeforeTheCarrierComesAreOne) {
  CacheStand stand;

  stand.mover().Kick();
  stand.mover().Kick();

  EXPECT_EQ(stand.carriers().waiting(), 1U);
}

TEST(MoverTest, KickWhileACarrierIsAtWorkIsHeard) {
  CacheStand stand;
  stand.Open("a");
  stand.Append("a", 0, kPage);
  stand.host().Set({.delay = 1, .on_delay = [&] { stand.mover().Kick(); }});
  stand.mover().Kick();

  stand.carriers().RunNext();

  EXPECT_EQ(stand.carriers().waiting(), 1U);
}

TEST(MoverTest, KickThatFindsTheQueueFullIsTriedAgain) {
  CacheStand stand({.queue_limit = 1});
  stand.Open("a");
  stand.Append("a", 0, kPage);
  ASSERT_OK(stand.carriers().Submit("other", [] {}));

  stand.mover().Kick();
  EXPECT_EQ(stand.carriers().RunAll(), 1U);
  EXPECT_TRUE(stand.cache().HasUnsealed());
  stand.Carry();

  EXPECT_FALSE(stand.cache().HasUnsealed());
}

TEST(MoverTest, BlockThatNoTierTakesWaitsForTheNextTry) {
  CacheStand stand;
  const SequenceRef sequence = stand.Open("a");
  stand.Append("a", 0, 3 * kPage);
  stand.host().Set({.refuse = 1});
  stand.Carry();
  EXPECT_THAT(Places(stand, sequence), Each(TierName::kDevice));
  EXPECT_TRUE(stand.cache().HasUnsealed());

  stand.host().Set({});
  stand.Carry();

  EXPECT_THAT(Places(stand, sequence), ElementsAre(kHost, kHost, kHost));
}

TEST(MoverTest, FullHostPassesItsOldestBlockOn) {
  CacheStand stand({.host_blocks = 2, .below_blocks = 10});
  const SequenceRef sequence = stand.Open("a");

  stand.Append("a", 0, 3 * kPage);
  stand.Carry();

  // Block 0 made room for block 2; then the host stood over its watermark.
  EXPECT_THAT(Places(stand, sequence), ElementsAre(kBelow, kBelow, kHost));
  EXPECT_FALSE(IsHeld(stand.host(), sequence->facts.key(0)));
  EXPECT_TRUE(IsHeld(stand.below(), sequence->facts.key(0)));
}

TEST(MoverTest, HostFullOfWhatCannotMoveIsPassedBy) {
  CacheStand stand({.host_blocks = 2, .below_blocks = 10});
  ASSERT_TRUE(stand.host_budget().TryCharge(stand.host_budget().free_bytes()));
  const SequenceRef sequence = stand.Open("a");
  stand.Append("a", 0, kPage);

  stand.Carry();

  EXPECT_THAT(Places(stand, sequence), ElementsAre(kBelow));
}

TEST(MoverTest, FullHostWithNothingBelowKeepsBlocksInTheirSlots) {
  CacheStand stand({.host_blocks = 1});
  const SequenceRef sequence = stand.Open("a");
  stand.Append("a", 0, 2 * kPage);
  stand.Carry();
  EXPECT_THAT(Places(stand, sequence), ElementsAre(kHost, TierName::kDevice));

  const SequenceRef other = stand.Open("b");
  stand.Close("a");  // Makes room.
  stand.Append("b", 0, kPage);
  stand.Carry();

  EXPECT_THAT(Places(stand, other), ElementsAre(kHost));
}

// --- moving down

TEST(MoverTest, HostOverItsWatermarkSinksToTheLowerOne) {
  CacheStand stand({.host_blocks = 100, .below_blocks = 100});
  const SequenceRef sequence = stand.Open("a", 2000);
  for (int32_t block = 0; block < 85; ++block) {
    stand.Append("a", static_cast<uint64_t>(block * kPage), kPage);
  }
  stand.Carry();
  EXPECT_THAT(Places(stand, sequence), Each(kHost));  // At 85 % it stands at its watermark.

  stand.Append("a", 85 * kPage, kPage);
  stand.Carry();

  const std::vector<TierName> places = Places(stand, sequence);
  EXPECT_EQ(std::ranges::count(places, kHost), 75);
  EXPECT_THAT(std::vector(places.begin(), places.begin() + 11), Each(kBelow));  // The oldest.
  EXPECT_EQ(stand.host().Usage().blocks, 75U);
  EXPECT_EQ(stand.below().Usage().blocks, 11U);
  EXPECT_EQ(stand.cache().Counters().blocks_moved_down, 11U);
}

TEST(MoverTest, MovedBlockIsTheSameBytes) {
  CacheStand stand({.host_blocks = 1, .below_blocks = 10});
  const SequenceRef sequence = stand.Open("a");
  stand.Append("a", 0, kPage);
  stand.Append("a", kPage, kPage);

  stand.Carry();

  ASSERT_EQ(Places(stand, sequence).front(), kBelow);
  for (uint32_t lane = 0; lane < 4; ++lane) {
    std::vector<std::byte> bytes(stand.Page(0, 0, 0).size());
    storage::PageRead read{.key = sequence->facts.key(0), .page = lane, .into = bytes};
    ASSERT_OK(stand.below().Read({&read, 1}, absl::InfiniteDuration()));
    EXPECT_EQ(read.state, storage::PageState::kOk);
    EXPECT_EQ(bytes, stand.Page(static_cast<int>(lane) / 2, static_cast<int>(lane) % 2, 0));
  }
}

TEST(MoverTest, FailingTierBelowIsDegradedUntilItTakesABlock) {
  CacheStand stand({.host_blocks = 2, .below_blocks = 10});
  const SequenceRef sequence = stand.Open("a");
  stand.Append("a", 0, 2 * kPage);
  EXPECT_EQ(stand.tiers().rocksdb->why_no_writes(), "");

  stand.below().Set({.refuse = 1});
  stand.Carry();

  EXPECT_EQ(stand.tiers().rocksdb->why_no_writes(), "faulty tier: write refused");
  EXPECT_THAT(Places(stand, sequence), ElementsAre(kHost, kHost));
  EXPECT_TRUE(IsHeld(stand.host(), sequence->facts.key(0)));
  stand.below().Set({});
  stand.Carry();
  EXPECT_EQ(stand.tiers().rocksdb->why_no_writes(), "");
  EXPECT_THAT(Places(stand, sequence), ElementsAre(kBelow, kHost));  // The oldest is still first.
}

// A bad sector is no reason to take no more blocks.
TEST(MoverTest, AReadThatFailsBelowHoldsUpNoBlock) {
  CacheStand stand({.host_blocks = 2, .below_blocks = 10});
  const SequenceRef sequence = stand.Open("a");
  stand.Append("a", 0, 2 * kPage);
  stand.below().Set({.refuse = 1});
  ASSERT_FALSE(stand.tiers().rocksdb->Read({}, absl::InfiniteDuration()).ok());
  stand.below().Set({});
  ASSERT_NE(stand.tiers().rocksdb->why_degraded(), "");

  stand.mover().Kick();
  stand.carriers().RunAll();

  EXPECT_THAT(Places(stand, sequence), ElementsAre(kBelow, kHost));
  const storage::RecordSize size = sequence->model->record_size();
  EXPECT_EQ(stand.mover().RoomOf({&size, 1}).below_why, "");
}

TEST(MoverTest, ABudgetUsedUpIsNoFault) {
  CacheStand stand({.host_blocks = 1, .below_blocks = 1});
  const SequenceRef sequence = stand.Open("a");
  stand.Append("a", 0, 3 * kPage);

  stand.Carry();

  EXPECT_EQ(stand.tiers().rocksdb->why_no_writes(), "");
  EXPECT_THAT(Places(stand, sequence), ElementsAre(kBelow, kHost, TierName::kDevice));
  EXPECT_TRUE(stand.cache().HasUnsealed());
}

// A large block waits to be sealed, and a small one behind it.
class TwoSizesTest : public testing::Test {
 protected:
  TwoSizesTest() {
    Geometry larger = test::SmallGeometry();
    larger.layers = 8;
    EXPECT_OK(stand.cache().RegisterModel("large", larger, "weights"));
    large = stand.Open("large one", 64, 64, "large");
    small = stand.Open("small one");
    for (uint32_t layer = 0; layer < 8; ++layer) {
      const Ticket ticket = stand.Begin("large one", layer, 0, kPage);
      stand.Place(ticket);
      stand.Finish(ticket);
    }
    stand.Append("small one", 0, kPage);
    EXPECT_GT(large->model->record_size().bytes, 2 * stand.host_cost());
  }

  CacheStand stand{{.host_blocks = 2, .below_blocks = 10}};
  SequenceRef large;
  SequenceRef small;
};

// Tiers keep records of different sizes apart: one that is full for some may take others.
TEST_F(TwoSizesTest, BlocksThatFindNoRoomHoldUpNoneOfAnotherSize) {
  stand.below().Set({.full = 1});

  stand.Carry();  // The host has no room for the large block, and the tier below takes none.

  EXPECT_THAT(Places(stand, large), ElementsAre(TierName::kDevice));
  EXPECT_THAT(Places(stand, small), ElementsAre(kHost));
}

TEST_F(TwoSizesTest, BlocksThatThereIsNoMemoryForHoldUpNoneOfAnotherSize) {
  bool is_first = true;
  stand.host().Set({.delay = 1, .on_delay = [&] {
                      if (std::exchange(is_first, false)) throw std::bad_alloc();
                    }});

  stand.Carry();

  EXPECT_THAT(Places(stand, large), ElementsAre(TierName::kDevice));
  EXPECT_THAT(Places(stand, small), ElementsAre(kHost));
}

TEST(MoverTest, BlockThatTheHostTierLostHoldsUpNoOther) {
  CacheStand stand({.host_blocks = 2, .below_blocks = 10});
  const SequenceRef sequence = stand.Open("a");
  stand.Append("a", 0, kPage);
  stand.Carry();
  const storage::BlockKey lost = sequence->facts.key(0);
  ASSERT_OK(stand.host().Erase({&lost, 1}));

  stand.Append("a", kPage, 2 * kPage);
  stand.Carry();

  EXPECT_THAT(Places(stand, sequence), ElementsAre(kHost, kBelow, kHost));  // Named where it was.
  EXPECT_EQ(stand.tiers().rocksdb->why_no_writes(), "");
}

TEST(MoverTest, RecordWithADamagedHeaderStaysNamedWhereItIs) {
  CacheStand stand({.host_blocks = 2, .below_blocks = 10});
  const SequenceRef sequence = stand.Open("a");
  stand.Append("a", 0, kPage);
  stand.Carry();
  const storage::BlockPin record = stand.host().Pin(sequence->facts.key(0));
  // The memory is the host tier's own and writable; a stray write hits it.
  const_cast<std::byte&>((*record)[40]) ^= std::byte{1};

  stand.Append("a", kPage, 2 * kPage);
  stand.Carry();

  EXPECT_THAT(Places(stand, sequence), ElementsAre(kHost, kBelow, kBelow));
  EXPECT_EQ(stand.tiers().rocksdb->why_no_writes(), "");  // The tier below is well.
}

// --- erasing and giving back

TEST(MoverTest, ClosedBlocksAreErasedInEveryTier) {
  CacheStand stand({.host_blocks = 2, .below_blocks = 10});
  stand.Open("a");
  stand.Append("a", 0, 3 * kPage);
  stand.Carry();
  ASSERT_GT(stand.below().Usage().blocks, 0U);

  stand.Close("a");

  EXPECT_EQ(stand.host().Usage().blocks, 0U);
  EXPECT_EQ(stand.below().Usage().blocks, 0U);
  EXPECT_EQ(stand.host_budget().used_bytes(), 0U);
}

TEST(MoverTest, ErasureThatATierDidNotTakeIsOwed) {
  CacheStand stand({.host_blocks = 2, .below_blocks = 10});
  stand.Open("a");
  stand.Append("a", 0, 3 * kPage);
  stand.Carry();
  stand.host().Set({.refuse = 1});
  stand.below().Set({.refuse = 1});

  stand.Close("a");
  stand.Carry();
  ASSERT_EQ(stand.host().Usage().blocks, 1U);
  ASSERT_EQ(stand.below().Usage().blocks, 2U);
  stand.host().Set({});
  stand.Carry();
  EXPECT_EQ(stand.host().Usage().blocks, 0U);
  EXPECT_EQ(stand.below().Usage().blocks, 2U);
  stand.below().Set({});
  stand.mover().Kick();
  stand.carriers().RunAll();
  EXPECT_EQ(stand.below().Usage().blocks, 2U) << "carriers do not wait for a degraded tier";
  stand.mover().ProbeBelow();

  EXPECT_EQ(stand.below().Usage().blocks, 0U);
}

TEST(MoverTest, CopyLeftInTheHostAfterAMoveIsErasedLater) {
  CacheStand stand({.host_blocks = 1, .below_blocks = 10});
  const SequenceRef sequence = stand.Open("a");
  stand.Append("a", 0, kPage);
  // The write is taken, all that follows is refused.
  stand.host().Set({.delay = 1, .on_delay = [&] { stand.host().Set({}); }});
  stand.below().Set({.delay = 1, .on_delay = [&] { stand.host().Set({.refuse = 1}); }});

  stand.Carry();

  ASSERT_THAT(Places(stand, sequence), ElementsAre(kBelow));
  ASSERT_EQ(stand.host().Usage().blocks, 1U);
  stand.host().Set({});
  stand.Carry();
  EXPECT_EQ(stand.host().Usage().blocks, 0U);
  EXPECT_TRUE(IsHeld(stand.below(), sequence->facts.key(0)));
}

TEST(MoverTest, FramesOfAClosedSequenceAreZeroedBeforeAnotherGetsThem) {
  CacheStand stand;
  stand.Open("a");
  stand.Append("a", 0, 20);
  ASSERT_GT(stand.cache().DeviceReport().used_bytes, 0U);

  stand.Close("a");

  EXPECT_EQ(stand.cache().DeviceReport().used_bytes, 0U);
  EXPECT_TRUE(IsZero(stand.pool()));
}

TEST(MoverTest, ReapingTwiceGivesBackOnce) {
  CacheStand stand;
  const SequenceRef sequence = stand.Open("a");
  stand.Open("b");
  const uint64_t used_bytes = stand.cache().DeviceReport().used_bytes;
  stand.Close("a");

  stand.mover().Reap(sequence);

  EXPECT_EQ(stand.cache().DeviceReport().used_bytes, used_bytes / 2);
}

TEST(MoverTest, OpenSequenceIsNotReaped) {
  CacheStand stand;
  const SequenceRef sequence = stand.Open("a");
  stand.Append("a", 0, 3);

  stand.mover().Reap(sequence);

  EXPECT_GT(stand.cache().DeviceReport().used_bytes, 0U);
  EXPECT_FALSE(IsZero(stand.pool()));
}

TEST(MoverTest, SequenceClosedUnderItsSealLeavesNothingBehind) {
  CacheStand stand;
  stand.Open("a");
  stand.Append("a", 0, kPage);
  uint64_t used_during_seal = 0;
  stand.host().Set({.delay = 1, .on_delay = [&] {
                      stand.host().Set({});
                      stand.Close("a");  // While its block is on the way to the host tier.
                      used_during_seal = stand.cache().DeviceReport().used_bytes;
                    }});

  stand.Carry();

  EXPECT_GT(used_during_seal, 0U);  // The carrier may still read the frames.
  EXPECT_EQ(stand.cache().DeviceReport().used_bytes, 0U);
  EXPECT_TRUE(IsZero(stand.pool()));
  EXPECT_EQ(stand.host().Usage().blocks, 0U);
  EXPECT_FALSE(stand.cache().HasUnsealed());
  stand.cache().CheckInvariants();
}

TEST(MoverTest, SequenceClosedUnderItsMoveLeavesNothingBehind) {
  CacheStand stand({.host_blocks = 1, .below_blocks = 10});
  stand.Open("a");
  stand.Append("a", 0, kPage);
  stand.below().Set({.delay = 1, .on_delay = [&] {
                       stand.below().Set({});
                       stand.Close("a");
                     }});

  stand.Carry();

  EXPECT_EQ(stand.host().Usage().blocks, 0U);
  EXPECT_EQ(stand.below().Usage().blocks, 0U);
  EXPECT_EQ(stand.cache().DeviceReport().used_bytes, 0U);
  EXPECT_EQ(stand.host_budget().used_bytes(), 0U);
}

// --- charging

TEST(MoverTest, HostMemoryIsChargedUntilItIsReleased) {
  CacheStand stand;
  {
    ASSERT_OK_AND_ASSIGN(storage::ByteCharge charge,
                         stand.mover().ChargeHost(1000, stand.clock().SinceStart()));
    EXPECT_EQ(stand.host_budget().used_bytes(), 1000U);
    charge.Keep(300);
  }
  EXPECT_EQ(stand.host_budget().used_bytes(), 300U);
  stand.mover().ReleaseHost(300);

  EXPECT_EQ(stand.host_budget().used_bytes(), 0U);
}

TEST(MoverTest, ChargeMovesAsManyBlocksAsItNeeds) {
  CacheStand stand({.host_blocks = 10, .below_blocks = 10});
  const SequenceRef sequence = stand.Open("a", 200);
  stand.Append("a", 0, 5 * kPage);
  stand.Carry();

  const auto charge = stand.mover().ChargeHost(7 * stand.host_cost(),
                                               stand.clock().SinceStart() + absl::Seconds(1));

  EXPECT_OK(charge.status());
  EXPECT_THAT(Places(stand, sequence), ElementsAre(kBelow, kBelow, kHost, kHost, kHost));
  EXPECT_EQ(stand.host_budget().free_bytes(), 0U);
}

TEST(MoverTest, ChargeThatDoesNotFitIsRefusedAndTakesNothing) {
  CacheStand stand({.host_blocks = 2});
  const uint64_t limit = stand.host_budget().limit_bytes();
  const auto held = stand.mover().ChargeHost(limit - 10, stand.clock().SinceStart());
  ASSERT_OK(held.status());

  const absl::Status status =
      stand.mover().ChargeHost(11, stand.clock().SinceStart() + absl::Hours(1)).status();

  EXPECT_THAT(status, test::StatusIs(
                          absl::StatusCode::kResourceExhausted,
                          AllOf(HasSubstr("11 B"), HasSubstr("10 of " + std::to_string(limit)))));
  EXPECT_EQ(ReasonOf(status), "LOWER_TIERS_FULL");
  EXPECT_EQ(stand.host_budget().free_bytes(), 10U);
  EXPECT_OK(stand.mover().ChargeHost(0, stand.clock().SinceStart()).status());  // Always fits.
}

TEST(MoverTest, ChargePastItsDeadlineMovesNothing) {
  CacheStand stand({.host_blocks = 10, .below_blocks = 10});
  const SequenceRef sequence = stand.Open("a");
  stand.Append("a", 0, 3 * kPage);
  stand.Carry();

  const absl::Status status =
      stand.mover().ChargeHost(8 * stand.host_cost(), stand.clock().SinceStart()).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Places(stand, sequence), Each(kHost));
}

TEST(MoverTest, ChargeThatTheTierBelowHoldsUpIsRefused) {
  CacheStand stand({.host_blocks = 3, .below_blocks = 10});
  stand.Open("a");
  stand.Append("a", 0, 2 * kPage);
  stand.Carry();
  stand.below().Set({.refuse = 1});

  const absl::Status status =
      stand.mover()
          .ChargeHost(3 * stand.host_cost(), stand.clock().SinceStart() + absl::Hours(1))
          .status();

  EXPECT_EQ(ReasonOf(status), "LOWER_TIERS_FULL");
}

// --- how much could be held

TEST(MoverTest, CapacityOfTheHostLeavesOneRecordsRoom) {
  CacheStand stand({.host_blocks = 10});
  const storage::RecordSize record = stand.record_size();

  const LowerRoom room = stand.mover().RoomOf({&record, 1});

  EXPECT_EQ(room.RecordsLeft(record, {}, 0), 9);
  EXPECT_EQ(room.RecordsLeft(record, {}, 1), 8);
  EXPECT_EQ(room.RecordsLeft(record, {}, 8 * stand.host_cost()), 1);
  EXPECT_EQ(room.RecordsLeft(record, {}, 9 * stand.host_cost()), 0);
}

TEST(MoverTest, CapacityBelowAddsAndSaysWhereTheTierIsDegraded) {
  CacheStand stand({.host_blocks = 2, .below_blocks = 5});
  const storage::RecordSize record = stand.record_size();
  const auto room = [&] { return stand.mover().RoomOf({&record, 1}); };
  EXPECT_EQ(room().RecordsLeft(record, {}, 0), 1 + 5);
  stand.Open("a");
  stand.Append("a", 0, 2 * kPage);
  stand.Carry();
  ASSERT_EQ(stand.below().Usage().blocks, 1U);
  EXPECT_EQ(room().RecordsLeft(record, {}, 0), 1 + 5);
  EXPECT_EQ(room().below_why, "");

  stand.below().Set({.refuse = 1});
  stand.Append("a", 2 * kPage, 2 * kPage);
  stand.Carry();

  EXPECT_NE(room().below_why, "");
}

}  // namespace
}  // namespace ebbtide::service
