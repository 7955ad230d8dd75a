// SPDX-License-Identifier: Apache-2.0

#include "service/model/lane.h"

#include <random>
#include <set>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/extent.h"
#include "tests/support/random_seed.h"

namespace ebbtide::service {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr int kPage = 16;
constexpr int32_t kLinger = 32;

TEST(LaneTest, NewTokensTakeTheLowestFreeSlots) {
  Lane lane(kPage, 64, kLinger);
  std::vector<int32_t> slots;

  lane.Append(3, &slots);

  EXPECT_THAT(slots, ElementsAre(0, 1, 2));
  EXPECT_EQ(lane.length(), 3);
  EXPECT_EQ(lane.resident(), 3);
  EXPECT_EQ(lane.free_slots(), 61);
}

TEST(LaneTest, DemotedTokenKeepsItsSlotWhileItLingers) {
  Lane lane(kPage, 64, kLinger);
  std::vector<int32_t> slots;
  lane.Append(20, &slots);

  lane.Demote(5);

  EXPECT_FALSE(lane.is_resident(5));
  EXPECT_EQ(lane.slot_of(5), 5);
  EXPECT_EQ(lane.slot_index()[5], gpu::kNoToken);
  EXPECT_EQ(lane.absent(0), 1);
  lane.Append(kLinger - 5, &slots);  // 47 tokens: block 0 ended 31 tokens ago.
  EXPECT_THAT(lane.Due(1, {}), IsEmpty());
  lane.Append(1, &slots);
  EXPECT_EQ(lane.slot_of(5), 5);
  EXPECT_EQ(lane.free_slots(), 16);
}

TEST(LaneTest, SlotIsTakenAgainOnceItsBlockIsOldEnough) {
  Lane lane(kPage, 64, kLinger);
  std::vector<int32_t> slots;
  lane.Append(kPage + kLinger, &slots);
  lane.Demote(5);
  lane.Demote(3);
  lane.Demote(kPage);  // Of a younger block: lingers.

  EXPECT_THAT(lane.Due(1, {}), ElementsAre(3, 5));
  lane.Append(3, &slots);

  EXPECT_THAT(slots, ElementsAre(3, 5, kPage + kLinger));
  EXPECT_EQ(lane.slot_index()[3], kPage + kLinger);
  EXPECT_EQ(lane.slot_of(3), kNoSlot);
  EXPECT_EQ(lane.slot_of(kPage), kPage);
  EXPECT_EQ(lane.leaving(), 1);
}

TEST(LaneTest, WhereNoOtherIsFreeTheOldestTokensGiveTheirSlots) {
  Lane lane(kPage, 32, kLinger);
  std::vector<int32_t> slots;
  lane.Append(32, &slots);
  lane.Demote(9);
  lane.Demote(2);

  EXPECT_THAT(lane.Due(1, {}), ElementsAre(2));
  EXPECT_THAT(lane.Due(2, std::vector<int32_t>{1}), ElementsAre(1, 2));
  lane.Append(1, &slots);

  EXPECT_THAT(slots, ElementsAre(2));
  EXPECT_EQ(lane.slot_of(9), 9);
}

TEST(LaneTest, NothingIsDueWhereNothingIsAppended) {
  Lane lane(kPage, 64, kLinger);
  std::vector<int32_t> slots;
  lane.Append(64, &slots);

  EXPECT_THAT(lane.Due(0, std::vector<int32_t>{0, 1}), IsEmpty());
}

TEST(LaneTest, TruncationFreesTheSlotsOfWhatItDrops) {
  Lane lane(kPage, 32, kLinger);
  std::vector<int32_t> slots;
  lane.Append(20, &slots);

  lane.Truncate(17);

  EXPECT_EQ(lane.length(), 17);
  EXPECT_EQ(lane.pages(), 2);
  EXPECT_EQ(lane.free_slots(), 15);
  lane.Truncate(16);
  EXPECT_EQ(lane.pages(), 1);
}

TEST(LaneTest, InvariantsHoldOverRandomOperations) {
  std::mt19937_64 random(test::RandomSeed());
  for (int run = 0; run < 50; ++run) {
    Lane lane(kPage, 96, kLinger);
    std::vector<int32_t> slots;
    for (int step = 0; step < 200; ++step) {
      const auto choice = random() % 3;
      const int32_t room = lane.free_slots() + lane.leaving();
      if (choice == 0 && room > 0) {
        const auto count = 1 + static_cast<int32_t>(random() % static_cast<uint64_t>(room));
        const std::vector<int32_t> due = lane.Due(count, {});
        lane.Append(count, &slots);
        for (const int32_t index : due) EXPECT_EQ(lane.slot_of(index), kNoSlot);
        EXPECT_EQ(std::set(slots.begin(), slots.end()).size(), static_cast<size_t>(count));
      } else if (choice == 1 && lane.length() > 0) {
        const auto index = static_cast<int32_t>(random() % static_cast<uint64_t>(lane.length()));
        const bool is_complete = index / kPage < lane.length() / kPage;
        if (is_complete && lane.is_resident(index)) lane.Demote(index);
      } else if (lane.length() % kPage != 0) {
        lane.Truncate(lane.length() - 1);
      }
      lane.CheckInvariants();
    }
  }
}

}  // namespace
}  // namespace ebbtide::service
