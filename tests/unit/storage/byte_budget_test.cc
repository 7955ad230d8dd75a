// SPDX-License-Identifier: Apache-2.0

#include "storage/byte_budget.h"

#include <atomic>
#include <limits>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/death_test.h"

namespace ebbtide::storage {
namespace {

using ByteBudgetDeathTest = test::ThreadsafeDeathTest;

TEST(ByteBudgetTest, TakesWhatFitsAndNothingMore) {
  ByteBudget budget(100);

  EXPECT_TRUE(budget.TryCharge(60));
  EXPECT_FALSE(budget.TryCharge(41));
  EXPECT_TRUE(budget.TryCharge(40));
  EXPECT_FALSE(budget.TryCharge(1));

  EXPECT_EQ(budget.used_bytes(), 100u);
  EXPECT_EQ(budget.free_bytes(), 0u);
}

TEST(ByteBudgetTest, HugeChargeDoesNotWrapAround) {
  ByteBudget budget(100);
  ASSERT_TRUE(budget.TryCharge(50));

  EXPECT_FALSE(budget.TryCharge(std::numeric_limits<uint64_t>::max()));
  EXPECT_FALSE(budget.TryCharge(std::numeric_limits<uint64_t>::max() - 49));
  EXPECT_EQ(budget.used_bytes(), 50u);
}

TEST(ByteBudgetTest, ReleasedBytesCanBeChargedAgain) {
  ByteBudget budget(100);
  ASSERT_TRUE(budget.TryCharge(100));
  budget.Release(30);

  EXPECT_FALSE(budget.TryCharge(31));
  EXPECT_TRUE(budget.TryCharge(30));
}

TEST(ByteBudgetTest, ReclaimRunsAfterEachChargeThatFits) {
  ByteBudget budget(100);
  std::vector<uint64_t> free_bytes;
  budget.SetReclaim([&] { free_bytes.push_back(budget.free_bytes()); });

  ASSERT_TRUE(budget.TryCharge(30));
  ASSERT_FALSE(budget.TryCharge(100));
  ASSERT_TRUE(budget.TryChargeWithoutReclaim(20));
  ASSERT_TRUE(budget.TryCharge(10));

  EXPECT_EQ(free_bytes, (std::vector<uint64_t>{70, 40}));
}

TEST(ByteBudgetTest, ThreadsTogetherNeverPassTheLimit) {
  ByteBudget budget(1000);
  std::atomic<bool> is_over = false;
  {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&] {
        for (uint64_t round = 0; round < 20000; ++round) {
          const uint64_t bytes = 1 + round % 400;
          if (!budget.TryCharge(bytes)) continue;
          if (budget.used_bytes() > 1000) is_over = true;
          budget.Release(bytes);
        }
      });
    }
  }

  EXPECT_FALSE(is_over);
  EXPECT_EQ(budget.used_bytes(), 0u);
}

TEST_F(ByteBudgetDeathTest, ReleasingMoreThanWasChargedIsABrokenContract) {
  ByteBudget budget(100);
  ASSERT_TRUE(budget.TryCharge(10));

  EXPECT_DEATH(budget.Release(11), "no more is released than was charged");
}

}  // namespace
}  // namespace ebbtide::storage
