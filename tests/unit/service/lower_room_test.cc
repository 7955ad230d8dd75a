// SPDX-License-Identifier: Apache-2.0

#include "service/model/lower_room.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <random>
#include <vector>

#include "tests/support/random_seed.h"

namespace ebbtide::service {
namespace {

using storage::RecordSize;

constexpr RecordSize kSmall = {.bytes = 100};
constexpr RecordSize kLarge = {.bytes = 300};

// Ten small or three large records in the host; three segments of four small, or two of two large,
// below.
LowerRoom TwoSizes() {
  return {.host_bytes = 1100,
          .below_bytes = 1500,
          .sizes = {{kSmall, {.host_cost_bytes = 110, .segment_slots = 4, .segment_bytes = 500}},
                    {kLarge, {.host_cost_bytes = 320, .segment_slots = 2, .segment_bytes = 700}}}};
}

TEST(LowerRoomTest, OneSizeFillsHostAndWholeSegmentsBelow) {
  for (uint64_t promised = 0; promised <= 10 + 12; ++promised) {
    EXPECT_EQ(TwoSizes().RecordsLeft(kSmall, {{kSmall, promised}}, 0), 10 + 12 - promised);
  }
  EXPECT_FALSE(TwoSizes().Fits({{kSmall, 23}}, 0));
  EXPECT_EQ(TwoSizes().RecordsLeft(kSmall, {{kSmall, 23}}, 0), 0);
  EXPECT_EQ(TwoSizes().RecordsLeft(kLarge, {}, 0), 3 + 4);
}

TEST(LowerRoomTest, MetadataTakesOfTheHostFirst) {
  EXPECT_EQ(TwoSizes().RecordsLeft(kSmall, {}, 1), 9 + 12);
  EXPECT_EQ(TwoSizes().RecordsLeft(kSmall, {}, 1100), 12);
  EXPECT_EQ(TwoSizes().RecordsLeft(kSmall, {}, uint64_t{1} << 60), 12);
}

TEST(LowerRoomTest, PromisesToOneSizeAreTakenFromTheOther) {
  EXPECT_EQ(TwoSizes().RecordsLeft(kLarge, {{kSmall, 12}}, 0), 3);      // Below, or in the host.
  EXPECT_EQ(TwoSizes().RecordsLeft(kLarge, {{kSmall, 12 + 3}}, 0), 2);  // Three stay in the host.
  EXPECT_EQ(TwoSizes().RecordsLeft(kLarge, {{kSmall, 12 + 10}}, 0), 0);
  EXPECT_FALSE(TwoSizes().Fits({{kSmall, 12 + 11}}, 0));
}

TEST(LowerRoomTest, WhatIsMadeForOneSizeIsNotPromisedToAnother) {
  LowerRoom room = TwoSizes();
  room.below_bytes = 0;
  room.sizes[kSmall].slots_made = 8;

  EXPECT_EQ(room.RecordsLeft(kSmall, {}, 0), 10 + 8);
  EXPECT_EQ(room.RecordsLeft(kLarge, {}, 0), 3);
  EXPECT_EQ(room.RecordsLeft(kLarge, {{kSmall, 8}}, 0), 3);   // They have a place of their own.
  EXPECT_EQ(room.RecordsLeft(kLarge, {{kSmall, 10}}, 0), 2);  // Two of them take of the host.
  EXPECT_EQ(room.RecordsLeft(kLarge, {{kLarge, 3}}, 0), 0);
  EXPECT_FALSE(room.Fits({{kLarge, 4}}, 0));
}

TEST(LowerRoomTest, FrozenTierBelowHoldsWhatItHolds) {
  LowerRoom room = TwoSizes();
  room.sizes[kSmall].slots_made = 8;

  room.FreezeBelow({{kSmall, 5}});

  EXPECT_EQ(room.RecordsLeft(kSmall, {}, 0), 10 + 5);
  EXPECT_EQ(room.RecordsLeft(kLarge, {}, 0), 3);
}

TEST(LowerRoomTest, WithoutATierBelowTheHostIsAll) {
  const LowerRoom room = {.host_bytes = 1100, .sizes = {{kSmall, {.host_cost_bytes = 110}}}};

  EXPECT_EQ(room.RecordsLeft(kSmall, {{kSmall, 4}}, 220), 4);
}

// One large record stays in the host where its segment would leave no room for the small ones',
// whichever size comes first.
TEST(LowerRoomTest, WhatIsPromisedInTheEndDoesNotDependOnWhoTakesOfTheHostFirst) {
  constexpr RecordSize kSmaller = {.bytes = 11};
  constexpr RecordSize kLarger = {.bytes = 21};
  const LowerRoom room = {
      .host_bytes = 33,
      .below_bytes = 249,
      .sizes = {{kSmaller, {.host_cost_bytes = 11, .segment_slots = 11, .segment_bytes = 121}},
                {kLarger, {.host_cost_bytes = 21, .segment_slots = 5, .segment_bytes = 105}}}};
  ASSERT_TRUE(room.Fits({{kLarger, 6}}, 0));
  ASSERT_GE(room.RecordsLeft(kSmaller, {{kLarger, 6}}, 0), 12);

  EXPECT_TRUE(room.Fits({{kSmaller, 6}, {kLarger, 6}}, 0));
}

// --- properties, against all ways to place

using Item = PromisedRecords::value_type;

// Whether some number of segments of each size leaves no more than the host holds.
bool CanBePlaced(const LowerRoom& room, std::vector<Item> promised, uint64_t host_bytes,
                 uint64_t below_bytes) {
  if (promised.empty()) return true;
  const auto [record_size, records] = promised.back();
  promised.pop_back();
  const LowerRoom::Size& size = room.sizes.at(record_size);
  for (uint64_t segments = 0; segments * size.segment_bytes <= below_bytes; ++segments) {
    const uint64_t below = size.slots_made + segments * size.segment_slots;
    const uint64_t in_host = (records - std::min(records, below)) * size.host_cost_bytes;
    if (in_host <= host_bytes && CanBePlaced(room, promised, host_bytes - in_host,
                                             below_bytes - segments * size.segment_bytes)) {
      return true;
    }
  }
  return false;
}

bool CanBePlaced(const LowerRoom& room, const PromisedRecords& promised) {
  return CanBePlaced(room, {promised.begin(), promised.end()}, room.host_bytes, room.below_bytes);
}

TEST(LowerRoomTest, FitsIsTrueOfWhatCanBePlacedAndOfNothingElse) {
  int fitting = 0;
  int all = 0;
  for (uint64_t host = 0; host <= 14; ++host) {
    for (uint64_t below = 0; below <= 24; below += 2) {
      for (const uint64_t made : {0, 2}) {
        LowerRoom room{.host_bytes = host, .below_bytes = below};
        room.sizes[{2}] = {
            .host_cost_bytes = 2, .slots_made = made, .segment_slots = 4, .segment_bytes = 9};
        room.sizes[{3}] = {
            .host_cost_bytes = 4, .slots_made = 0, .segment_slots = 2, .segment_bytes = 7};
        room.sizes[{5}] = {
            .host_cost_bytes = 5, .slots_made = 0, .segment_slots = 1, .segment_bytes = 6};
        for (uint64_t records = 0; records < 8 * 6 * 5; ++records) {
          const PromisedRecords promised = {
              {{2}, records % 8}, {{3}, records / 8 % 6}, {{5}, records / 48}};
          const bool can_be_placed = CanBePlaced(room, promised);
          ASSERT_EQ(room.Fits(promised, 0), can_be_placed)
              << "host " << host << " below " << below << " made " << made << ": " << records;
          ++all;
          fitting += can_be_placed ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(fitting, all / 4);
  EXPECT_LT(fitting, all * 3 / 4);
}

class DrawnRoom {
 public:
  explicit DrawnRoom(uint64_t seed, size_t sizes) : random_(seed) {
    const uint64_t segment = 64 + UpTo(448);
    room_.host_bytes = UpTo(400);
    room_.below_bytes = UpTo(3 * segment);
    while (room_.sizes.size() < sizes) {
      const uint64_t bytes = 1 + UpTo(60);
      const uint64_t slots = std::max<uint64_t>(segment / bytes, 1);
      room_.sizes[{.bytes = bytes, .header_used_bytes = UpTo(1)}] = {
          .host_cost_bytes = bytes + UpTo(2),
          .slots_made = UpTo(1) * UpTo(6),
          .segment_slots = slots,
          .segment_bytes = slots * (bytes + UpTo(1))};
    }
  }
  const LowerRoom& room() const { return room_; }
  uint64_t UpTo(uint64_t most) { return random_() % (most + 1); }
  RecordSize AnySize() {
    return std::next(room_.sizes.begin(), static_cast<ptrdiff_t>(UpTo(room_.sizes.size() - 1)))
        ->first;
  }

 private:
  std::mt19937_64 random_;
  LowerRoom room_;
};

TEST(LowerRoomTest, WhatIsPromisedStepByStepFitsAndFitsWithLess) {
  const uint64_t seed = test::RandomSeed();
  for (uint64_t round = 0; round < 3000; ++round) {
    DrawnRoom drawn(seed + round, 2 + round % 2);
    const LowerRoom& room = drawn.room();
    PromisedRecords promised;
    for (int step = 0; step < 20; ++step) {
      const RecordSize size = drawn.AnySize();
      const uint64_t left = room.RecordsLeft(size, promised, 0);
      promised[size] += left + 1;
      ASSERT_FALSE(room.Fits(promised, 0)) << "round " << round << " step " << step;
      promised[size] -= 1 + drawn.UpTo(left);
      ASSERT_TRUE(room.Fits(promised, 0)) << "round " << round << " step " << step;
      ASSERT_TRUE(CanBePlaced(room, promised)) << "round " << round << " step " << step;
      if (step % 3 == 0) {  // Some of one size go.
        const auto less = promised.find(size);
        less->second -= drawn.UpTo(less->second);
        ASSERT_TRUE(room.Fits(promised, 0)) << "round " << round << " step " << step;
      }
    }
  }
}

TEST(LowerRoomTest, SegmentIsTakenWhereItsBytesAre) {
  LowerRoom room = TwoSizes();

  EXPECT_TRUE(room.TakeSegment(kLarge));
  EXPECT_TRUE(room.TakeSegment(kLarge));
  EXPECT_FALSE(room.TakeSegment(kSmall));

  EXPECT_EQ(room.below_bytes, 100);
  EXPECT_EQ(room.sizes.at(kLarge).slots_made, 4);
  EXPECT_EQ(room.sizes.at(kSmall).slots_made, 0);
  room.sizes.at(kSmall).segment_slots = 0;
  EXPECT_FALSE(room.TakeSegment(kSmall));
}

// Blocks come into the host in any order; where it is full, the oldest goes below whose size has a
// slot free, or a segment that leaves room for the rest. Then all that fitted finds its place.
TEST(LowerRoomTest, WhatFitsFindsItsPlaceWhateverComesFirst) {
  const uint64_t seed = test::RandomSeed();
  uint64_t moved = 0;
  for (uint64_t round = 0; round < 2000; ++round) {
    DrawnRoom drawn(seed + round, 2 + round % 2);
    LowerRoom room = drawn.room();
    PromisedRecords promised;
    std::vector<RecordSize> blocks;
    for (int step = 0; step < 6; ++step) {
      const RecordSize size = drawn.AnySize();
      const uint64_t more = drawn.UpTo(room.RecordsLeft(size, promised, 0));
      promised[size] += more;
      blocks.insert(blocks.end(), more, size);
    }
    for (size_t i = 1; i < blocks.size(); ++i) std::swap(blocks[i], blocks[drawn.UpTo(i)]);

    uint64_t largest = 0;  // Beside the host's share: as much as one record takes.
    for (const auto& [size, of_it] : room.sizes) largest = std::max(largest, of_it.host_cost_bytes);
    uint64_t free = room.host_bytes + largest;
    std::vector<RecordSize> host;
    std::map<RecordSize, uint64_t> slots_used;
    const auto goes_below = [&](const RecordSize& record_size) {
      LowerRoom after = room;
      if (slots_used[record_size] == room.sizes.at(record_size).slots_made) {
        if (!after.TakeSegment(record_size) || !after.Fits(promised, 0)) return false;
        room = after;
      }
      ++slots_used[record_size];
      return true;
    };
    for (const RecordSize& block : blocks) {
      while (free < room.sizes.at(block).host_cost_bytes) {
        const auto first = std::ranges::find_if(host, goes_below);
        ASSERT_NE(first, host.end()) << "round " << round << ": none may move";
        free += room.sizes.at(*first).host_cost_bytes;
        host.erase(first);
        ++moved;
      }
      free -= room.sizes.at(block).host_cost_bytes;
      host.push_back(block);
    }
  }
  EXPECT_GT(moved, 2000u);
}

}  // namespace
}  // namespace ebbtide::service
