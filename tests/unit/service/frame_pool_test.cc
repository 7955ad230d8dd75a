// SPDX-License-Identifier: Apache-2.0

#include "service/model/frame_pool.h"

#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/random_seed.h"

namespace ebbtide::service {
namespace {

constexpr uint64_t kUnit = FramePool::kAlignment;

TEST(FramePoolTest, ReservesNoMoreThanItsBudget) {
  FramePool pool(10 * kUnit);

  EXPECT_EQ(pool.Reserve(4 * kUnit), 0U);
  EXPECT_EQ(pool.Reserve(6 * kUnit), 4 * kUnit);
  EXPECT_FALSE(pool.Reserve(1).has_value());
  EXPECT_EQ(pool.free_bytes(), 0U);
}

TEST(FramePoolTest, NeighboursGivenBackAreOneRunAgain) {
  FramePool pool(9 * kUnit);
  const uint64_t a = *pool.Reserve(3 * kUnit);
  const uint64_t b = *pool.Reserve(3 * kUnit);
  const uint64_t c = *pool.Reserve(3 * kUnit);

  pool.Release(a, 3 * kUnit);
  pool.Release(c, 3 * kUnit);
  EXPECT_FALSE(pool.Reserve(6 * kUnit).has_value());
  pool.Release(b, 3 * kUnit);

  EXPECT_EQ(pool.Reserve(9 * kUnit), 0U);
}

TEST(FramePoolTest, RunsNeverOverlapOverRandomOperations) {
  std::mt19937_64 random(test::RandomSeed());
  FramePool pool(1000 * kUnit);
  std::vector<std::pair<uint64_t, uint64_t>> runs;
  for (int step = 0; step < 3000; ++step) {
    if (random() % 2 == 0) {
      const uint64_t bytes = (random() % 60 + 1) * kUnit;
      if (const auto offset = pool.Reserve(bytes)) {
        for (const auto& [other, length] : runs) {
          ASSERT_TRUE(*offset + bytes <= other || other + length <= *offset);
        }
        ASSERT_LE(*offset + bytes, pool.budget_bytes());
        runs.emplace_back(*offset, bytes);
      }
    } else if (!runs.empty()) {
      const size_t i = random() % runs.size();
      pool.Release(runs[i].first, runs[i].second);
      runs.erase(runs.begin() + static_cast<ptrdiff_t>(i));
    }
  }
  for (const auto& [offset, bytes] : runs) pool.Release(offset, bytes);
  EXPECT_EQ(pool.Reserve(pool.budget_bytes()), 0U);
}

}  // namespace
}  // namespace ebbtide::service
