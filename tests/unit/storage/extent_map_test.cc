// SPDX-License-Identifier: Apache-2.0
//
// Small cases by hand, then random operations against a plain bitmap that knows who owns each unit.

#include "storage/host/extent_map.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/death_test.h"
#include "tests/support/random_seed.h"

namespace ebbtide::storage {
namespace {

using ExtentMapDeathTest = test::ThreadsafeDeathTest;

ExtentMap MapOf(uint64_t bytes) {
  ExtentMap map;
  map.Free({.offset = 0, .bytes = bytes});
  return map;
}

TEST(ExtentMapTest, StartsWithNothingFree) {
  ExtentMap map;

  EXPECT_EQ(map.Allocate(1), std::nullopt);
  EXPECT_EQ(map.free_bytes(), 0u);
}

TEST(ExtentMapTest, AllocatesTheSmallestRangeThatFits) {
  ExtentMap map;
  map.Free({.offset = 0, .bytes = 100});
  map.Free({.offset = 200, .bytes = 30});
  map.Free({.offset = 300, .bytes = 40});

  EXPECT_EQ(map.Allocate(35), (Extent{.offset = 300, .bytes = 35}));
  EXPECT_EQ(map.Allocate(30), (Extent{.offset = 200, .bytes = 30}));
  EXPECT_EQ(map.Allocate(41), (Extent{.offset = 0, .bytes = 41}));
  EXPECT_EQ(map.free_bytes(), 64u);
}

TEST(ExtentMapTest, LowestOfEqualRangesIsTaken) {
  ExtentMap map;
  map.Free({.offset = 500, .bytes = 10});
  map.Free({.offset = 100, .bytes = 10});

  EXPECT_EQ(map.Allocate(10), (Extent{.offset = 100, .bytes = 10}));
}

TEST(ExtentMapTest, FreedNeighboursAreJoinedOnBothSides) {
  ExtentMap map = MapOf(30);
  const Extent a = *map.Allocate(10);
  const Extent b = *map.Allocate(10);
  const Extent c = *map.Allocate(10);
  map.Free(a);
  map.Free(c);
  ASSERT_EQ(map.ranges(), 2u);

  map.Free(b);

  EXPECT_EQ(map.ranges(), 1u);
  EXPECT_EQ(map.free_bytes(), 30u);
  map.CheckInvariants();
}

TEST(ExtentMapTest, EqualSizesNeverFragment) {
  ExtentMap map = MapOf(64 * 7);
  std::vector<Extent> held;
  while (const auto extent = map.Allocate(7)) held.push_back(*extent);
  ASSERT_EQ(held.size(), 64u);
  for (size_t i = 0; i < held.size(); i += 2) map.Free(held[i]);

  for (int i = 0; i < 32; ++i) EXPECT_TRUE(map.Allocate(7).has_value()) << i;

  EXPECT_EQ(map.free_bytes(), 0u);
}

TEST_F(ExtentMapDeathTest, FreeingTwiceIsABrokenContract) {
  ExtentMap map = MapOf(100);
  const Extent extent = *map.Allocate(10);
  map.Free(extent);

  EXPECT_DEATH(map.Free(extent), "an extent is freed once");
  EXPECT_DEATH(map.Free({.offset = 5, .bytes = 1}), "an extent is freed once");
  EXPECT_DEATH(map.Free({.offset = 99, .bytes = 10}), "an extent is freed once");
}

// A bitmap of units, each free or owned by one extent.
class Bitmap {
 public:
  explicit Bitmap(size_t units) : owned_(units, false) {}

  bool Own(const Extent& extent, bool owned) {  // False where a unit was so already.
    for (uint64_t unit = extent.offset; unit < extent.end(); ++unit) {
      if (owned_[unit] == owned) return false;
      owned_[unit] = owned;
    }
    return true;
  }
  uint64_t free() const {
    return static_cast<uint64_t>(std::count(owned_.begin(), owned_.end(), false));
  }
  uint64_t longest_free() const {
    uint64_t longest = 0;
    uint64_t run = 0;
    for (const bool owned : owned_) {
      run = owned ? 0 : run + 1;
      longest = std::max(longest, run);
    }
    return longest;
  }

 private:
  std::vector<bool> owned_;
};

TEST(ExtentMapTest, RandomOperationsAgreeWithABitmap) {
  test::ForEachSeed(20, [](uint64_t seed) {
    std::mt19937_64 random(seed);
    constexpr uint64_t kUnits = 257;
    ExtentMap map = MapOf(kUnits);
    Bitmap bitmap(kUnits);
    std::vector<Extent> held;
    for (int step = 0; step < 2000; ++step) {
      const bool frees = !held.empty() && random() % 100 < 48;
      if (frees) {
        std::swap(held[random() % held.size()], held.back());
        map.Free(held.back());
        ASSERT_TRUE(bitmap.Own(held.back(), false));
        held.pop_back();
      } else {
        const uint64_t bytes = 1 + random() % 40;
        const uint64_t longest = bitmap.longest_free();
        const auto extent = map.Allocate(bytes);
        ASSERT_EQ(extent ? extent->bytes : 0, longest < bytes ? 0 : bytes);
        if (extent) {
          ASSERT_TRUE(bitmap.Own(*extent, true)) << "two owners of one place";
          held.push_back(*extent);
        }
      }
      ASSERT_EQ(map.free_bytes(), bitmap.free());
      map.CheckInvariants();
    }
  });
}

}  // namespace
}  // namespace ebbtide::storage
