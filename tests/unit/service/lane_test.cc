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

TEST(LaneTest, NewTokensTakeTheLowestFreeSlots) {
  Lane lane(16, 64);
  std::vector<int32_t> slots;

  lane.Append(3, &slots);

  EXPECT_THAT(slots, ElementsAre(0, 1, 2));
  EXPECT_EQ(lane.length(), 3);
  EXPECT_EQ(lane.resident(), 3);
  EXPECT_EQ(lane.free_slots(), 61);
}

TEST(LaneTest, DemotedTokenKeepsItsSlotUntilItsBlockIsConfirmed) {
  Lane lane(16, 32);
  std::vector<int32_t> slots;
  lane.Append(20, &slots);

  lane.Demote(5);

  EXPECT_FALSE(lane.is_resident(5));
  EXPECT_EQ(lane.slot_of(5), 5);
  EXPECT_EQ(lane.slot_index()[5], gpu::kNoToken);
  EXPECT_EQ(lane.absent(0), 1);
  lane.Reclaim([](int32_t) { return false; });
  EXPECT_EQ(lane.free_slots(), 12);
  lane.Reclaim([](int32_t block) { return block == 0; });
  EXPECT_EQ(lane.free_slots(), 13);
  EXPECT_EQ(lane.slot_of(5), kNoSlot);
}

TEST(LaneTest, ReclaimedSlotIsTakenAgain) {
  Lane lane(16, 16);
  std::vector<int32_t> slots;
  lane.Append(16, &slots);
  lane.Demote(3);
  lane.Reclaim([](int32_t) { return true; });

  lane.Append(1, &slots);

  EXPECT_THAT(slots, ElementsAre(3));
  EXPECT_EQ(lane.slot_index()[3], 16);
}

TEST(LaneTest, TruncationFreesTheSlotsOfWhatItDrops) {
  Lane lane(16, 32);
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
    Lane lane(16, 96);
    std::set<int32_t> confirmed;
    std::vector<int32_t> slots;
    for (int step = 0; step < 200; ++step) {
      const auto choice = random() % 4;
      if (choice == 0 && lane.free_slots() > 0) {
        lane.Append(static_cast<int32_t>(random() % static_cast<uint64_t>(lane.free_slots())) + 1,
                    &slots);
      } else if (choice == 1 && lane.length() > 0) {
        const auto index = static_cast<int32_t>(random() % static_cast<uint64_t>(lane.length()));
        const bool is_complete = index / 16 < lane.length() / 16;
        if (is_complete && lane.is_resident(index)) lane.Demote(index);
      } else if (choice == 2) {
        confirmed.insert(static_cast<int32_t>(random() % 8));
        const auto is_confirmed = [&](int32_t b) { return confirmed.contains(b); };
        const int32_t expected = lane.free_slots() + lane.Reclaimable(is_confirmed);
        lane.Reclaim(is_confirmed);
        EXPECT_EQ(lane.free_slots(), expected);
      } else if (lane.length() % 16 != 0) {
        lane.Truncate(lane.length() - 1);
      }
      lane.CheckInvariants();
    }
  }
}

}  // namespace
}  // namespace ebbtide::service
