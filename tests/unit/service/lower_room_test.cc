// SPDX-License-Identifier: Apache-2.0

#include "service/model/lower_room.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/support/random_seed.h"

namespace ebbtide::service {
namespace {

constexpr uint64_t kSmall = 100;
constexpr uint64_t kLarge = 300;

// Ten small or three large records in the host; three runs of four small, or two of two large,
// below.
LowerRoom TwoSizes() {
  return {.host_bytes = 1100,
          .below_bytes = 1500,
          .sizes = {
              {kSmall, {.host_cost_bytes = 110, .run_records_below = 4, .run_bytes_below = 500}},
              {kLarge, {.host_cost_bytes = 320, .run_records_below = 2, .run_bytes_below = 700}}}};
}

TEST(LowerRoomTest, OneSizeFillsHostAndWholeRunsBelow) {
  for (uint64_t promised = 0; promised <= 10 + 12; ++promised) {
    EXPECT_EQ(TwoSizes().RecordsLeft(kSmall, {{kSmall, promised}}, 0), 10 + 12 - promised);
  }
  EXPECT_EQ(TwoSizes().RecordsLeft(kSmall, {{kSmall, 23}}, 0), std::nullopt);
  EXPECT_EQ(TwoSizes().RecordsLeft(kLarge, {}, 0), 3 + 4);
}

TEST(LowerRoomTest, MetadataTakesOfTheHostFirst) {
  EXPECT_EQ(TwoSizes().RecordsLeft(kSmall, {}, 1), 9 + 12);
  EXPECT_EQ(TwoSizes().RecordsLeft(kSmall, {}, 1100), 12);
  EXPECT_EQ(TwoSizes().RecordsLeft(kSmall, {}, uint64_t{1} << 60), 12);
}

TEST(LowerRoomTest, PromisesToOneSizeAreTakenFromTheOther) {
  // Six runs' worth: the twelve below, and the host's.
  EXPECT_EQ(TwoSizes().RecordsLeft(kLarge, {{kSmall, 12}}, 0), 3);
  EXPECT_EQ(TwoSizes().RecordsLeft(kLarge, {{kSmall, 12 + 3}}, 0), 2);  // Three stay in the host.
  EXPECT_EQ(TwoSizes().RecordsLeft(kLarge, {{kSmall, 12 + 10}}, 0), 0);
  EXPECT_EQ(TwoSizes().RecordsLeft(kLarge, {{kSmall, 12 + 11}}, 0), std::nullopt);
}

TEST(LowerRoomTest, WhatIsKeptForOneSizeIsNotPromisedToAnother) {
  LowerRoom room = TwoSizes();
  room.below_bytes = 0;
  room.sizes[kSmall].kept_below = 8;

  EXPECT_EQ(room.RecordsLeft(kSmall, {}, 0), 10 + 8);
  EXPECT_EQ(room.RecordsLeft(kLarge, {}, 0), 3);
  EXPECT_EQ(room.RecordsLeft(kLarge, {{kSmall, 8}}, 0), 3);   // They have a place of their own.
  EXPECT_EQ(room.RecordsLeft(kLarge, {{kSmall, 10}}, 0), 2);  // Two of them take of the host.
  EXPECT_EQ(room.RecordsLeft(kLarge, {{kLarge, 3}}, 0), 0);
  EXPECT_EQ(room.RecordsLeft(kLarge, {{kLarge, 4}}, 0), std::nullopt);
}

TEST(LowerRoomTest, WithoutATierBelowTheHostIsAll) {
  const LowerRoom room = {.host_bytes = 1100, .sizes = {{kSmall, {.host_cost_bytes = 110}}}};

  EXPECT_EQ(room.RecordsLeft(kSmall, {{kSmall, 4}}, 220), 4);
}

TEST(LowerRoomTest, SizeFirstPromisedAfterALookIsCountedByItsBytes) {
  EXPECT_EQ(TwoSizes().RecordsLeft(kSmall, {{1300, 1}}, 0), 10);  // It takes of what lies below.
  EXPECT_EQ(TwoSizes().RecordsLeft(kSmall, {{1000, 2}}, 0), 0 + 4);
  EXPECT_EQ(TwoSizes().RecordsLeft(kSmall, {{1501, 1}}, 0), std::nullopt);
}

// What is promised can be put somewhere: some whole runs of each size below, the rest in the host.
bool CanBePut(const LowerRoom& room, const PromisedRecords& promised) {
  const LowerRoom::Size& small = room.sizes.at(kSmall);
  const LowerRoom::Size& large = room.sizes.at(kLarge);
  const auto in_host = [](const LowerRoom::Size& size, uint64_t records, uint64_t runs) {
    const uint64_t below = size.kept_below + runs * size.run_records_below;
    return (records - std::min(records, below)) * size.host_cost_bytes;
  };
  for (uint64_t of_small = 0; of_small * small.run_bytes_below <= room.below_bytes; ++of_small) {
    const uint64_t left = room.below_bytes - of_small * small.run_bytes_below;
    const uint64_t of_large = left / large.run_bytes_below;
    if (in_host(small, promised.at(kSmall), of_small) +
            in_host(large, promised.at(kLarge), of_large) <=
        room.host_bytes) {
      return true;
    }
  }
  return false;
}

TEST(LowerRoomTest, NothingIsPromisedThatFindsNoPlace) {
  std::mt19937_64 random(test::RandomSeed());
  const auto up_to = [&](uint64_t most) { return random() % (most + 1); };
  int fitting = 0;
  for (int round = 0; round < 20000; ++round) {
    LowerRoom room{.host_bytes = up_to(2000), .below_bytes = up_to(4000)};
    for (const uint64_t bytes : {kSmall, kLarge}) {
      const uint64_t run = 1 + up_to(5);
      room.sizes[bytes] = {.host_cost_bytes = bytes + 10,
                           .kept_below = up_to(6),
                           .run_records_below = run,
                           .run_bytes_below = run * (bytes + 5)};
    }
    PromisedRecords promised = {{kSmall, up_to(40)}, {kLarge, up_to(15)}};
    const auto left = room.RecordsLeft(kLarge, promised, 0);
    if (!left.has_value()) continue;
    ++fitting;
    ASSERT_TRUE(CanBePut(room, promised)) << "round " << round;
    promised[kLarge] += *left;
    ASSERT_TRUE(CanBePut(room, promised)) << "round " << round << ": " << *left << " more";
    ASSERT_EQ(room.RecordsLeft(kLarge, promised, 0), 0) << "round " << round;
  }
  EXPECT_GT(fitting, 1000);
}

}  // namespace
}  // namespace ebbtide::service
