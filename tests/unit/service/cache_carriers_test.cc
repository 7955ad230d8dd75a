// SPDX-License-Identifier: Apache-2.0
//
// Plans and commits of blocks: what carriers are told, in which order, and what they may do to a
// sequence that is closed meanwhile.

#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/status_matchers.h"
#include "tests/unit/service/cache_stand.h"

namespace ebbtide::service {
namespace {

using test::CacheStand;
using test::StatusIs;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int32_t kPage = 16;

class CacheCarriersTest : public testing::Test {
 protected:
  CacheCarriersTest() : sequence_(stand_.Open("a", 64)) {}

  Cache& cache() { return stand_.cache(); }
  Block BlockOf(size_t block) { return cache().Places(sequence_)[block]; }
  // Seals the next block into `tier`.
  void Seal(TierName tier) { EXPECT_FALSE(cache().CommitSeal(*cache().PlanSeal(), tier)); }

  CacheStand stand_;
  SequenceRef sequence_;
};

TEST_F(CacheCarriersTest, NothingIsPlannedBeforeABlockIsComplete) {
  stand_.Append("a", 0, kPage - 1);
  const Ticket ticket = stand_.Begin("a", 0, kPage - 1, 1);
  stand_.Place(ticket);
  stand_.Finish(ticket);  // Complete in one layer of two.

  EXPECT_FALSE(cache().PlanSeal().has_value());
  EXPECT_FALSE(cache().PlanMoveDown().has_value());
  EXPECT_FALSE(cache().HasUnsealed());
}

TEST_F(CacheCarriersTest, SealPlanNamesTheSlotsOfEveryLaneAndThePositions) {
  stand_.Append("a", 0, 3 * kPage);
  for (int block = 0; block < 3; ++block) Seal(TierName::kHost);
  stand_.Append("a", 3 * kPage, kPage, {5, 4});  // Its first tokens take slots 4 and 5.

  const auto plan = cache().PlanSeal();

  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->sequence, sequence_);
  EXPECT_EQ(plan->block, 3);
  EXPECT_EQ(plan->key, sequence_->facts.key(3));
  ASSERT_EQ(plan->slots.size(), 4U * kPage);
  for (size_t lane = 0; lane < 4; ++lane) {
    EXPECT_EQ(plan->slots[lane * kPage + 0], 4);
    EXPECT_EQ(plan->slots[lane * kPage + 1], 5);
    EXPECT_EQ(plan->slots[lane * kPage + 2], 3 * kPage);
  }
  ASSERT_EQ(plan->positions.size(), static_cast<size_t>(kPage));
  EXPECT_EQ(plan->positions.front(), 3 * kPage);
  EXPECT_EQ(plan->positions.back(), 4 * kPage - 1);
}

TEST_F(CacheCarriersTest, SlotsOfAPlanAreNotGivenToOthersBeforeItsCommit) {
  stand_.Append("a", 0, kPage);
  const auto plan = cache().PlanSeal();

  stand_.Append("a", kPage, 4, {0, 1, 2, 3});

  for (int32_t index = 0; index < 4; ++index) {
    EXPECT_EQ(sequence_->facts.lane(0, 0).slot_of(index), plan->slots[static_cast<size_t>(index)]);
    EXPECT_EQ(sequence_->facts.lane(0, 0).slot_of(kPage + index), kPage + index);
  }
}

TEST_F(CacheCarriersTest, BlocksAreSealedInTheOrderTheyBecameComplete) {
  stand_.Open("b");
  stand_.Append("b", 0, kPage);
  stand_.Append("a", 0, 2 * kPage);

  EXPECT_EQ(cache().PlanSeal()->key.sequence, (*cache().Find("b"))->facts.number);
  EXPECT_EQ(cache().PlanSeal()->key, sequence_->facts.key(0));
  EXPECT_EQ(cache().PlanSeal()->key, sequence_->facts.key(1));
  EXPECT_FALSE(cache().PlanSeal().has_value());
  EXPECT_TRUE(cache().HasUnsealed());  // Planned is not sealed.
}

TEST_F(CacheCarriersTest, CommittedSealHasItsPlaceAndIsCounted) {
  stand_.Append("a", 0, 2 * kPage);

  Seal(TierName::kHost);
  EXPECT_TRUE(cache().HasUnsealed());
  Seal(TierName::kRocksdb);

  EXPECT_FALSE(cache().HasUnsealed());
  EXPECT_EQ(BlockOf(0).stage, BlockStage::kSealed);
  EXPECT_EQ(BlockOf(0).tier, TierName::kHost);
  EXPECT_EQ(BlockOf(1).tier, TierName::kRocksdb);
  EXPECT_EQ(cache().Counters().blocks_sealed, 2U);
  cache().CheckInvariants();
}

TEST_F(CacheCarriersTest, BlockThatCouldNotBeWrittenKeepsItsPlace) {
  stand_.Append("a", 0, 2 * kPage);

  EXPECT_FALSE(cache().CommitSeal(*cache().PlanSeal(), absl::UnavailableError("")));
  EXPECT_EQ(BlockOf(0).stage, BlockStage::kSealing);
  const auto again = cache().PlanSeal();
  EXPECT_EQ(again->block, 0);

  EXPECT_FALSE(cache().CommitSeal(*again, absl::ResourceExhaustedError("")));
  const storage::RecordSize full[] = {stand_.record_size()};
  EXPECT_FALSE(cache().PlanSeal(full).has_value());
  EXPECT_EQ(cache().PlanSeal()->block, 0);
  EXPECT_EQ(cache().PlanSeal()->block, 1);
  EXPECT_EQ(cache().Counters().blocks_sealed, 0U);
}

TEST_F(CacheCarriersTest, OldestBlockOfTheHostMovesDownFirst) {
  stand_.Append("a", 0, 3 * kPage);
  Seal(TierName::kHost);
  Seal(TierName::kRocksdb);  // Not in the host tier: nothing to move.
  Seal(TierName::kHost);

  const auto first = cache().PlanMoveDown();
  const auto second = cache().PlanMoveDown();

  EXPECT_EQ(first->block, 0);
  EXPECT_EQ(first->key, sequence_->facts.key(0));
  EXPECT_THAT(first->slots, IsEmpty());
  EXPECT_EQ(second->block, 2);
  EXPECT_FALSE(cache().PlanMoveDown().has_value());
  EXPECT_EQ(BlockOf(0).tier, TierName::kHost);  // Until the commit.
}

TEST_F(CacheCarriersTest, MoveIsCommittedByItsOutcome) {
  stand_.Append("a", 0, 3 * kPage);
  for (int block = 0; block < 3; ++block) Seal(TierName::kHost);

  EXPECT_FALSE(cache().CommitMoveDown(*cache().PlanMoveDown(), CarryOutcome::kMoved));
  EXPECT_EQ(BlockOf(0).tier, TierName::kRocksdb);
  EXPECT_EQ(cache().Counters().blocks_moved_down, 1U);

  EXPECT_FALSE(cache().CommitMoveDown(*cache().PlanMoveDown(), CarryOutcome::kRetry));
  EXPECT_EQ(BlockOf(1).tier, TierName::kHost);
  const auto again = cache().PlanMoveDown();
  EXPECT_EQ(again->block, 1);  // It is still the oldest.
  const auto next = cache().PlanMoveDown();
  EXPECT_EQ(next->block, 2);

  EXPECT_FALSE(cache().CommitMoveDown(*next, CarryOutcome::kLost));
  EXPECT_EQ(BlockOf(2).tier, TierName::kHost);  // Named where it was lost.
  EXPECT_FALSE(cache().PlanMoveDown().has_value());
  EXPECT_EQ(cache().Counters().blocks_moved_down, 1U);
}

// --- segments below

class CacheSegmentsTest : public CacheCarriersTest {
 protected:
  CacheSegmentsTest() {
    stand_.SetRoom([this](std::span<const storage::RecordSize> sizes) {
      LowerRoom room{.below_bytes = below_bytes_};
      for (const storage::RecordSize& size : sizes) {
        room.sizes[size] = {.segment_slots = 2, .segment_bytes = 10};
      }
      if (const auto other = room.sizes.find(kOther); other != room.sizes.end()) {
        other->second.slots_made = 2 * begun_;
        other->second.segments_begun = begun_;
      }
      return room;
    });
  }
  absl::Status Place(int32_t tokens) {
    const Ticket ticket = stand_.Begin("a", 0, 0, tokens);
    const std::vector<std::vector<int32_t>> nobody(2);
    std::vector<std::vector<int32_t>> slots;
    const absl::Status status =
        cache().Place(ticket, {.victims = nobody, .positions = {}}, &slots).status();
    status.ok() ? void(cache().Withdraw(ticket)) : cache().Abandon(ticket);
    return status;
  }

  static constexpr storage::RecordSize kOther = {.bytes = 12345};
  uint64_t below_bytes_ = 20;  // For two segments.
  uint64_t begun_ = 0;         // Segments for records of kOther.
};

TEST_F(CacheSegmentsTest, SegmentIsBegunWhereWhatIsPromisedFitsBesideIt) {
  stand_.Append("a", 0, 2 * kPage);  // Two records: a segment of their own.

  EXPECT_TRUE(cache().BeginSegment(kOther));
  cache().EndSegment();
  below_bytes_ = 10;
  EXPECT_FALSE(cache().BeginSegment(kOther));
  EXPECT_TRUE(cache().BeginSegment(stand_.record_size()));
  cache().EndSegment();
  below_bytes_ = 9;
  EXPECT_FALSE(cache().BeginSegment(stand_.record_size()));
}

TEST_F(CacheSegmentsTest, WhatFitsNoMoreIsMovedAsItComes) {
  stand_.Append("a", 0, 3 * kPage);
  below_bytes_ = 10;  // As where a tier lost some.

  EXPECT_TRUE(cache().BeginSegment(kOther));
  cache().EndSegment();
}

TEST_F(CacheSegmentsTest, SegmentThatIsBegunIsNotPromised) {
  EXPECT_OK(Place(4 * kPage));
  ASSERT_TRUE(cache().BeginSegment(kOther));

  EXPECT_FALSE(Place(3 * kPage).ok());
  EXPECT_OK(Place(2 * kPage));

  cache().EndSegment();
  EXPECT_OK(Place(4 * kPage));
}

TEST_F(CacheSegmentsTest, SegmentThatIsBegunIsTakenFromTheRoomOnce) {
  ASSERT_TRUE(cache().BeginSegment(kOther));

  begun_ = 1;  // It is there.
  below_bytes_ = 10;

  EXPECT_OK(Place(2 * kPage));
  EXPECT_FALSE(Place(3 * kPage).ok());
  cache().EndSegment();
  EXPECT_OK(Place(2 * kPage));
}

// Their slots are held until they can be erased.
TEST_F(CacheSegmentsTest, SlotsOfClosedSequencesAreNoRoomWhileTheTierIsIll) {
  std::string why;
  stand_.SetRoom([&](std::span<const storage::RecordSize> sizes) {
    LowerRoom room{.below_why = why};
    for (const storage::RecordSize& size : sizes) room.sizes[size].slots_made = 4;
    return room;
  });
  stand_.Open("b");
  stand_.Append("b", 0, 2 * kPage);
  Seal(TierName::kHost);
  Seal(TierName::kRocksdb);
  EXPECT_FALSE(cache().CommitMoveDown(*cache().PlanMoveDown(), CarryOutcome::kMoved));
  cache().CheckInvariants();

  why = "it does not answer";
  EXPECT_THAT(Place(1), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr(why)));
  ASSERT_OK(cache().Close("b", "CLOSED").status());
  EXPECT_THAT(Place(1), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr(why)));

  why = "";
  EXPECT_OK(Place(4 * kPage));
}

TEST_F(CacheSegmentsTest, OneSegmentIsBegunAtATime) {
  ASSERT_TRUE(cache().BeginSegment(kOther));
  absl::Notification has_begun;
  std::thread other([&] {
    EXPECT_TRUE(cache().BeginSegment(kOther));
    has_begun.Notify();
  });
  EXPECT_FALSE(has_begun.WaitForNotificationWithTimeout(absl::Milliseconds(20)));

  cache().EndSegment();

  other.join();
  cache().EndSegment();
}

TEST_F(CacheCarriersTest, ClosedSequenceIsPlannedNoMore) {
  stand_.Append("a", 0, 2 * kPage);
  Seal(TierName::kHost);
  ASSERT_TRUE(cache().Close("a", "CLOSED").ok());

  EXPECT_FALSE(cache().PlanSeal().has_value());
  EXPECT_FALSE(cache().PlanMoveDown().has_value());
}

// A write that was given up may still arrive: what is not known to be unwritten is erased.
TEST_F(CacheCarriersTest, CopyThatMayHaveBeenMadeForAClosedSequenceIsToBeErased) {
  stand_.Append("a", 0, 3 * kPage);
  Seal(TierName::kHost);
  const auto seal = cache().PlanSeal();
  const auto unwritten = cache().PlanSeal();
  const auto move = cache().PlanMoveDown();
  const auto closed = cache().Close("a", "CLOSED");
  ASSERT_TRUE(closed.ok());

  EXPECT_EQ((*closed)->blocks.size(), 3U);
  EXPECT_TRUE(cache().CommitSeal(*seal, TierName::kHost));
  EXPECT_TRUE(cache().CommitSeal(*unwritten, absl::UnavailableError("")));
  EXPECT_TRUE(cache().CommitMoveDown(*move, CarryOutcome::kRetry));

  EXPECT_FALSE(cache().PlanSeal().has_value());
  EXPECT_EQ(cache().Counters().blocks_sealed, 1U);
  EXPECT_EQ(cache().Counters().blocks_moved_down, 0U);
  cache().CheckInvariants();
}

TEST_F(CacheCarriersTest, MoveOfAClosedSequenceIsErasedHoweverItEnded) {
  stand_.Append("a", 0, 2 * kPage);
  Seal(TierName::kHost);
  Seal(TierName::kHost);
  const auto refused = cache().PlanMoveDown();
  const auto lost = cache().PlanMoveDown();
  ASSERT_TRUE(cache().Close("a", "CLOSED").ok());

  EXPECT_TRUE(cache().CommitMoveDown(*refused, CarryOutcome::kRetry));
  EXPECT_TRUE(cache().CommitMoveDown(*lost, CarryOutcome::kLost));

  EXPECT_FALSE(cache().PlanMoveDown().has_value());
}

TEST_F(CacheCarriersTest, EveryCarrierHoldsTheFramesOfAClosedSequence) {
  stand_.Append("a", 0, 2 * kPage);
  Seal(TierName::kHost);
  const auto seal = cache().PlanSeal();
  const auto move = cache().PlanMoveDown();
  ASSERT_TRUE(cache().Close("a", "CLOSED").ok());

  cache().CommitMoveDown(*move, CarryOutcome::kMoved);
  EXPECT_FALSE(cache().MayReap(sequence_));
  cache().CommitSeal(*seal, TierName::kHost);

  EXPECT_TRUE(cache().MayReap(sequence_));
}

TEST_F(CacheCarriersTest, WaitForSealsEndsWithTheLastCommit) {
  stand_.Append("a", 0, 2 * kPage);
  std::thread carrier([this] { stand_.Carry(); });

  cache().WaitForSeals(absl::InfiniteDuration());

  EXPECT_FALSE(cache().HasUnsealed());
  carrier.join();
}

TEST_F(CacheCarriersTest, WaitForSealsEndsAtItsDeadline) {
  stand_.Append("a", 0, kPage);

  cache().WaitForSeals(stand_.clock().SinceStart());

  EXPECT_TRUE(cache().HasUnsealed());
}

}  // namespace
}  // namespace ebbtide::service
