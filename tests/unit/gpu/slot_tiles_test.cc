// SPDX-License-Identifier: Apache-2.0
//
// Tiles against a list made the plain way, over extents with holes.

#include "gpu/cpu/slot_tiles.h"

#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/unit/gpu/sample_lane.h"

namespace ebbtide::gpu {
namespace {

struct Listed {
  const std::byte* key;
  const std::byte* value;
  int32_t index;
  int32_t column;
  friend bool operator==(const Listed&, const Listed&) = default;
};

std::vector<Listed> Visible(std::span<const Extent> extents, size_t row_bytes, int32_t limit) {
  std::vector<Listed> listed;
  int32_t column = 0;
  for (const Extent& extent : extents) {
    for (size_t s = 0; s < static_cast<size_t>(extent.slots); ++s, ++column) {
      if (extent.index[s] == kNoToken || extent.index[s] > limit) continue;
      listed.push_back(
          {extent.key + s * row_bytes, extent.value + s * row_bytes, extent.index[s], column});
    }
  }
  return listed;
}

void AppendTile(const SlotTile& tile, std::vector<Listed>& listed) {
  for (size_t s = 0; s < static_cast<size_t>(tile.slots); ++s) {
    listed.push_back({tile.key[s], tile.value[s], tile.index[s], tile.column[s]});
  }
}

TEST(SlotTilesTest, ListsVisibleSlotsInOrderInFullTiles) {
  test::ForEachSeed(100, [](uint64_t seed) {
    std::mt19937_64 random(seed);
    const SampleLane lane({.head_dim = 3,
                           .slots = static_cast<int>(1 + random() % 700),
                           .extent_slots = static_cast<int>(1 + random() % 64),
                           .empty_one_in = static_cast<int>(random() % 5)},
                          random);
    const std::vector<Extent>& extents = lane.extents();
    const size_t count = random() % (extents.size() + 1);
    const auto limit = static_cast<int32_t>(random() % 800) - 20;
    SlotTiles tiles({.extents = extents, .count = count, .row_bytes = 6, .index_limit = limit});

    std::vector<Listed> listed;
    while (tiles.Advance()) {
      ASSERT_GE(tiles.tile().slots, 1);
      const size_t before = listed.size();
      ASSERT_EQ(before % SlotTile::kSlotsMax, 0U) << "a tile before the last was not full";
      AppendTile(tiles.tile(), listed);
    }

    ASSERT_EQ(listed, Visible(std::span(extents).first(count), 6, limit));
  });
}

TEST(SlotTilesTest, TilesEndWithExtentsWhereThatIsAskedFor) {
  test::ForEachSeed(20, [](uint64_t seed) {
    std::mt19937_64 random(seed);
    const SampleLane lane({.head_dim = 3,
                           .slots = static_cast<int>(1 + random() % 400),
                           .extent_slots = static_cast<int>(1 + random() % 64),
                           .empty_one_in = static_cast<int>(random() % 3)},
                          random);
    const std::vector<Extent>& extents = lane.extents();
    const size_t count = 1 + random() % extents.size();
    SlotTiles tiles({.extents = extents,
                     .count = count,
                     .row_bytes = 6,
                     .index_limit = 1000,
                     .ends_with_extents = true});

    size_t next = 0;
    while (tiles.Advance()) {
      const SlotTile& tile = tiles.tile();
      ASSERT_GE(tile.extent, next);
      for (; next < tile.extent; ++next) {
        ASSERT_TRUE(Visible({&extents[next], 1}, 6, 1000).empty()) << "left out " << next;
      }
      std::vector<Listed> listed;
      AppendTile(tile, listed);
      for (Listed& slot : listed) slot.column -= static_cast<int32_t>(next) * extents[0].slots;
      ASSERT_EQ(listed, Visible({&extents[next++], 1}, 6, 1000));
    }

    for (; next < count; ++next) ASSERT_TRUE(Visible({&extents[next], 1}, 6, 1000).empty());
  });
}

TEST(SlotTilesTest, LooksPastTheListedExtentsWithoutListingThem) {
  std::mt19937_64 random(test::RandomSeed());
  const SampleLane lane({.head_dim = 3, .slots = 60, .extent_slots = 20}, random);
  SlotTiles tiles({.extents = lane.extents(), .count = 1, .row_bytes = 6, .index_limit = 1000});

  ASSERT_TRUE(tiles.Advance());
  EXPECT_EQ(tiles.tile().slots, 20);
  EXPECT_EQ(tiles.next().slots, 40);
  EXPECT_EQ(tiles.next().key[0], lane.extents()[1].key);
  EXPECT_FALSE(tiles.Advance());
}

TEST(SlotTilesTest, NothingVisibleIsNoTile) {
  std::mt19937_64 random(test::RandomSeed());
  const SampleLane lane({.head_dim = 3, .slots = 60, .empty_one_in = 1}, random);

  SlotTiles empty({.extents = lane.extents(), .count = 2, .row_bytes = 6, .index_limit = 1000});
  SlotTiles none({.extents = {}, .count = 0, .row_bytes = 6, .index_limit = 1000});

  EXPECT_FALSE(empty.Advance());
  EXPECT_FALSE(none.Advance());
}

}  // namespace
}  // namespace ebbtide::gpu
