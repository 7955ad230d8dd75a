// SPDX-License-Identifier: Apache-2.0

#include "storage/byte_budget.h"

#include <atomic>
#include <limits>
#include <new>
#include <optional>
#include <thread>
#include <utility>
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

TEST(ByteBudgetTest, ChargeThatReclaimingBreaksIsGivenBack) {
  ByteBudget budget(100);
  budget.SetReclaim([] { throw std::bad_alloc(); });

  EXPECT_THROW((void)budget.TryCharge(30), std::bad_alloc);

  EXPECT_EQ(budget.used_bytes(), 0u);
}

TEST(ByteChargeTest, IsGivenBackButForWhatIsKept) {
  ByteBudget budget(100);
  {
    std::optional<ByteCharge> charge = ByteCharge::Try(budget, 60);
    ASSERT_TRUE(charge.has_value());
    EXPECT_EQ(charge->bytes(), 60u);
    EXPECT_FALSE(ByteCharge::Try(budget, 41).has_value());
    charge->Keep(25);
    EXPECT_EQ(charge->bytes(), 35u);
    EXPECT_EQ(budget.used_bytes(), 60u);
  }
  EXPECT_EQ(budget.used_bytes(), 25u);
}

TEST(ByteChargeTest, HasOneOwner) {
  ByteBudget budget(100);
  ByteBudget other(100);
  {
    ByteCharge first = *ByteCharge::Try(budget, 10);
    ByteCharge second = std::move(first);
    EXPECT_EQ(second.bytes(), 10u);
    first = *ByteCharge::Try(other, 7);
    second = std::move(first);
    first = ByteCharge();
    EXPECT_EQ(budget.used_bytes(), 0u);
    EXPECT_EQ(other.used_bytes(), 7u);
    second.Keep(7);
  }
  EXPECT_EQ(budget.used_bytes(), 0u);
  EXPECT_EQ(other.used_bytes(), 7u);
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

TEST_F(ByteBudgetDeathTest, KeepingMoreThanWasChargedIsABrokenContract) {
  ByteBudget budget(100);
  ByteCharge charge = *ByteCharge::Try(budget, 10);

  EXPECT_DEATH(charge.Keep(11), "no more is kept than was charged");
}

TEST_F(ByteBudgetDeathTest, ReleasingMoreThanWasChargedIsABrokenContract) {
  ByteBudget budget(100);
  ASSERT_TRUE(budget.TryCharge(10));

  EXPECT_DEATH(budget.Release(11), "no more is released than was charged");
}

}  // namespace
}  // namespace ebbtide::storage
