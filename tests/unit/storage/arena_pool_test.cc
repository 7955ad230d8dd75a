// SPDX-License-Identifier: Apache-2.0
//
// Memory held is read from the arena's descriptor, so that the budget is checked against the kernel
// and not against the pool's own books.

#include "storage/host/arena_pool.h"

#include <sys/stat.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "storage/byte_budget.h"
#include "tests/support/random_seed.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::storage {
namespace {

using test::StatusIs;
using testing::Each;

constexpr uint64_t kKiB = 1 << 10;
constexpr uint64_t kMiB = 1 << 20;

class ArenaPoolTest : public testing::Test {
 protected:
  uint64_t HeldBytes() const {
    struct stat status = {};
    EXPECT_EQ(fstat(pool_->arena().fd(), &status), 0);
    return static_cast<uint64_t>(status.st_blocks) * 512;
  }

  absl::StatusOr<Extent> Store(uint64_t bytes, uint8_t value = 1) {
    return pool_->Store(std::vector<std::byte>(bytes, std::byte{value}), 0);
  }

  ByteBudget budget_{16 * kMiB};
  std::shared_ptr<ArenaPool> pool_ = *ArenaPool::Create(budget_);
};

TEST_F(ArenaPoolTest, ChargesBytesAndOverhead) {
  const std::vector<std::byte> bytes(64 * kKiB);

  ASSERT_OK_AND_ASSIGN(const Extent extent, pool_->Store(bytes, 100));

  EXPECT_EQ(budget_.used_bytes(), 64 * kKiB + 100);
  pool_->Free(extent, 100);
  EXPECT_EQ(budget_.used_bytes(), 0u);
}

TEST_F(ArenaPoolTest, FullIsRefusedWithBothNumbers) {
  ASSERT_OK(Store(15 * kMiB));

  EXPECT_THAT(Store(2 * kMiB), StatusIs(absl::StatusCode::kResourceExhausted,
                                        "host tier: 2097152 B over budget, 1048576 B of 16777216 B "
                                        "free; demote or evict first"));
  EXPECT_EQ(budget_.used_bytes(), 15 * kMiB);
  EXPECT_OK(Store(1 * kMiB));
}

TEST_F(ArenaPoolTest, FreedMemoryIsReusedAndNothingOfItsOwnerIsLeft) {
  ASSERT_OK_AND_ASSIGN(const Extent first, Store(256 * kKiB, 1));
  pool_->Free(first, 0);

  ASSERT_OK_AND_ASSIGN(const Extent second, Store(256 * kKiB, 2));

  EXPECT_EQ(second, first);
  EXPECT_EQ(HeldBytes(), 256 * kKiB);
  EXPECT_THAT(pool_->bytes(second), Each(std::byte{2}));
}

TEST_F(ArenaPoolTest, IdleMemoryFollowsUse) {
  std::vector<Extent> held;
  for (int i = 0; i < 64; ++i) {
    ASSERT_OK_AND_ASSIGN(held.emplace_back(), Store(256 * kKiB));
  }
  ASSERT_EQ(HeldBytes(), 16 * kMiB);

  for (const Extent& extent : held) pool_->Free(extent, 0);

  EXPECT_LE(HeldBytes(), 1 * kMiB);  // A sixteenth of the budget stays warm.
}

TEST_F(ArenaPoolTest, OthersChargesReclaimWarmMemory) {
  std::vector<Extent> held;
  for (int i = 0; i < 4; ++i) {
    ASSERT_OK_AND_ASSIGN(held.emplace_back(), Store(256 * kKiB));
  }
  for (const Extent& extent : held) pool_->Free(extent, 0);
  ASSERT_EQ(HeldBytes(), kMiB);

  ASSERT_TRUE(budget_.TryCharge(16 * kMiB - 256 * kKiB));

  EXPECT_EQ(HeldBytes(), 256 * kKiB);
  ASSERT_TRUE(budget_.TryCharge(256 * kKiB));
  EXPECT_EQ(HeldBytes(), 0u);
}

TEST_F(ArenaPoolTest, BudgetMayOutliveThePool) {
  pool_.reset();

  EXPECT_TRUE(budget_.TryCharge(16 * kMiB));
}

TEST_F(ArenaPoolTest, RandomUseHoldsNoMoreMemoryThanTheBudget) {
  test::ForEachSeed(3, [this](uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<Extent> held;
    uint64_t others_bytes = 0;
    for (int step = 0; step < 3000; ++step) {
      const uint64_t choice = random() % 100;
      if (choice < 45) {
        const auto extent = Store((1 + random() % 128) * 4 * kKiB);
        if (extent.ok()) held.push_back(*extent);
      } else if (choice < 85 && !held.empty()) {
        std::swap(held[random() % held.size()], held.back());
        pool_->Free(held.back(), 0);
        held.pop_back();
      } else if (choice < 95) {
        const uint64_t bytes = random() % kMiB;
        if (budget_.TryCharge(bytes)) others_bytes += bytes;
      } else {
        budget_.Release(others_bytes);
        others_bytes = 0;
      }
      ASSERT_LE(HeldBytes() + others_bytes, budget_.limit_bytes()) << "step " << step;
    }
    for (const Extent& extent : held) pool_->Free(extent, 0);
    budget_.Release(others_bytes);
    ASSERT_EQ(budget_.used_bytes(), 0u);
  });
}

// Blocks of three models, churned at nine tenths full; then the largest is asked for.
TEST_F(ArenaPoolTest, MixedSizesNeverFragmentIt) {
  test::ForEachSeed(3, [this](uint64_t seed) {
    std::mt19937_64 random(seed);
    constexpr std::array<uint64_t, 3> kSizes = {12 * kKiB, 44 * kKiB, 260 * kKiB};
    std::vector<Extent> held;
    const auto free_one = [&] {
      std::swap(held[random() % held.size()], held.back());
      pool_->Free(held.back(), 0);
      held.pop_back();
    };
    for (int step = 0; step < 6000; ++step) {
      const uint64_t bytes = kSizes[random() % kSizes.size()];
      while (budget_.used_bytes() + bytes > budget_.limit_bytes() / 10 * 9) free_one();
      ASSERT_OK_AND_ASSIGN(const Extent extent, Store(bytes));
      held.push_back(extent);
    }
    while (budget_.free_bytes() < 2 * kSizes[2]) free_one();

    EXPECT_OK(Store(kSizes[2]));

    pool_ = *ArenaPool::Create(budget_);
    budget_.Release(budget_.used_bytes());
  });
}

TEST_F(ArenaPoolTest, ThreadsGetPlacesOfTheirOwn) {
  std::atomic<int> damaged = 0;
  {
    std::vector<std::jthread> threads;
    for (uint8_t thread = 1; thread <= 4; ++thread) {
      threads.emplace_back([&, thread] {
        std::mt19937_64 random(thread);
        for (int round = 0; round < 300; ++round) {
          const auto extent = Store((1 + random() % 64) * 4 * kKiB, thread);
          if (!extent.ok()) continue;
          for (const std::byte byte : pool_->bytes(*extent)) {
            if (byte != std::byte{thread}) ++damaged;
          }
          pool_->Free(*extent, 0);
        }
      });
    }
  }

  EXPECT_EQ(damaged, 0);
  EXPECT_EQ(budget_.used_bytes(), 0u);
}

// --- memory that a device reads in place

// A device's part, by its own books. Thread-safe.
class Registry {
 public:
  bool refuses = false;

  ArenaPool::RegisterMemory Registrar() {
    return [this](std::span<std::byte> memory) -> absl::StatusOr<std::shared_ptr<void>> {
      const std::lock_guard guard(mu_);
      if (refuses) return absl::ResourceExhaustedError("no more can be registered");
      const auto next = registered_.lower_bound(memory.data());
      EXPECT_TRUE(next == registered_.end() || memory.data() + memory.size() <= next->first);
      if (next != registered_.begin()) {
        const auto before = std::prev(next);
        EXPECT_LE(before->first + before->second, memory.data());
      }
      registered_[memory.data()] = memory.size();
      return std::shared_ptr<void>(memory.data(), [this](void* gone) {
        EXPECT_NE(*static_cast<std::byte*>(gone), std::byte{0}) << "its memory went first";
        const std::lock_guard again(mu_);
        EXPECT_EQ(registered_.erase(static_cast<std::byte*>(gone)), 1u);
      });
    };
  }

  bool Holds(std::span<const std::byte> memory) const {
    const std::lock_guard guard(mu_);
    const auto found = registered_.find(const_cast<std::byte*>(memory.data()));
    return found != registered_.end() && found->second == memory.size();
  }
  uint64_t bytes() const {
    const std::lock_guard guard(mu_);
    return std::accumulate(registered_.begin(), registered_.end(), uint64_t{0},
                           [](uint64_t sum, const auto& each) { return sum + each.second; });
  }

 private:
  mutable std::mutex mu_;
  std::map<std::byte*, uint64_t> registered_;
};

class RegisteredArenaPoolTest : public ArenaPoolTest {
 protected:
  RegisteredArenaPoolTest() { pool_->RegisterWith(registry_.Registrar()); }
  ~RegisteredArenaPoolTest() override {
    pool_.reset();
    EXPECT_EQ(registry_.bytes(), 0u);
  }

  bool IsWithinReach(const Extent& extent) const {
    const std::span<const std::byte> bytes = pool_->bytes(extent);
    const std::span<const std::byte> lockable = pool_->reachable();
    return bytes.data() >= lockable.data() &&
           bytes.data() + bytes.size() <= lockable.data() + lockable.size();
  }

  Registry registry_;
};

TEST_F(RegisteredArenaPoolTest, WhatHoldsMemoryIsRegisteredAndNothingElse) {
  ASSERT_OK_AND_ASSIGN(const Extent warm, Store(256 * kKiB));
  ASSERT_OK_AND_ASSIGN(const Extent kept, Store(64 * kKiB));
  EXPECT_TRUE(IsWithinReach(kept));
  EXPECT_TRUE(registry_.Holds(pool_->bytes(kept)));

  pool_->Free(warm, 0);
  EXPECT_TRUE(registry_.Holds(pool_->bytes(warm)));
  ASSERT_TRUE(budget_.TryCharge(budget_.free_bytes()));

  EXPECT_FALSE(registry_.Holds(pool_->bytes(warm)));
  EXPECT_TRUE(registry_.Holds(pool_->bytes(kept)));
  EXPECT_EQ(registry_.bytes(), HeldBytes());
}

TEST_F(RegisteredArenaPoolTest, WarmMemoryIsUsedAgainAsItIs) {
  ASSERT_OK_AND_ASSIGN(const Extent first, Store(256 * kKiB));
  pool_->Free(first, 0);
  registry_.refuses = true;  // Nobody is asked.

  ASSERT_OK_AND_ASSIGN(const Extent second, Store(256 * kKiB, 2));

  EXPECT_EQ(second, first);
  EXPECT_TRUE(registry_.Holds(pool_->bytes(second)));
}

TEST_F(RegisteredArenaPoolTest, WhatCanNotBeRegisteredLiesOutOfReach) {
  registry_.refuses = true;

  ASSERT_OK_AND_ASSIGN(const Extent extent, Store(256 * kKiB, 3));

  EXPECT_FALSE(IsWithinReach(extent));
  EXPECT_THAT(pool_->bytes(extent), Each(std::byte{3}));
  EXPECT_EQ(HeldBytes(), 256 * kKiB);
  EXPECT_EQ(budget_.used_bytes(), 256 * kKiB);
  // Tried again after a while.
  registry_.refuses = false;
  int stores = 0;
  for (bool is_within_reach = false; !is_within_reach; ++stores) {
    ASSERT_LE(stores, 64);
    ASSERT_OK_AND_ASSIGN(const Extent next, Store(4 * kKiB));
    is_within_reach = IsWithinReach(next);
  }
  EXPECT_GT(stores, 32);
}

TEST_F(RegisteredArenaPoolTest, ThreadsGetPlacesThatAreRegistered) {
  std::atomic<int> unregistered = 0;
  {
    std::vector<std::jthread> threads;
    for (uint8_t thread = 1; thread <= 4; ++thread) {
      threads.emplace_back([&, thread] {
        std::mt19937_64 random(thread);
        for (int round = 0; round < 300; ++round) {
          const auto extent = Store((1 + random() % 64) * 16 * kKiB, thread);
          if (!extent.ok()) continue;
          if (!registry_.Holds(pool_->bytes(*extent))) ++unregistered;
          pool_->Free(*extent, 0);
        }
      });
    }
  }

  EXPECT_EQ(unregistered, 0);
  EXPECT_LE(HeldBytes(), 1 * kMiB);
}

TEST_F(RegisteredArenaPoolTest, RandomUseNamesNothingWithinReachThatIsNotRegistered) {
  test::ForEachSeed(3, [this](uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<Extent> held;
    for (int step = 0; step < 2000; ++step) {
      registry_.refuses = random() % 8 == 0;
      if (random() % 100 < 52) {
        const auto extent = Store((1 + random() % 8) * 64 * kKiB);
        if (extent.ok()) held.push_back(*extent);
      } else if (!held.empty()) {
        std::swap(held[random() % held.size()], held.back());
        pool_->Free(held.back(), 0);
        held.pop_back();
      }
      for (const Extent& extent : held) {
        ASSERT_EQ(IsWithinReach(extent), registry_.Holds(pool_->bytes(extent)));
      }
      ASSERT_LE(HeldBytes(), budget_.limit_bytes());
      ASSERT_LE(registry_.bytes(), HeldBytes());
    }
    for (const Extent& extent : held) pool_->Free(extent, 0);
    ASSERT_EQ(budget_.used_bytes(), 0u);
  });
}

TEST_F(RegisteredArenaPoolTest, MemoryThatRunsOutInARegistrationLeavesNothing) {
  pool_ = *ArenaPool::Create(budget_);
  pool_->RegisterWith([](std::span<std::byte>) -> absl::StatusOr<std::shared_ptr<void>> {
    throw std::bad_alloc();
  });

  EXPECT_THROW(static_cast<void>(Store(256 * kKiB)), std::bad_alloc);

  EXPECT_EQ(budget_.used_bytes(), 0u);
  EXPECT_EQ(HeldBytes(), 0u);
}

}  // namespace
}  // namespace ebbtide::storage
