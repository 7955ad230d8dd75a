// SPDX-License-Identifier: Apache-2.0
//
// What the host tier promises beyond the tier contract: one budget with its neighbours, and all of
// its memory in it.

#include "storage/host/host_tier.h"

#include <malloc.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "base/executor.h"
#include "storage/byte_budget.h"
#include "tests/support/record_pattern.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::storage {
namespace {

using test::MakeGeometry;
using test::MakeRecord;
using test::StatusIs;
using testing::HasSubstr;

absl::Status WriteBlock(HostTier& tier, const BlockKey& key, const RecordGeometry& geometry) {
  const std::vector<std::byte> record = MakeRecord(key, geometry);
  const BlockWrite write = {.key = key, .record = record};
  return tier.Write({&write, 1});
}

uint64_t CostIn(const HostTier& tier, const RecordSize& size) {
  return tier.Room({&size, 1}).sizes.front().segment_bytes;
}

TEST(HostTierTest, BudgetBeyondTheMachineIsRefusedWithBothNumbers) {
  ByteBudget budget(uint64_t{AvailableMemoryBytes()} + 1);

  EXPECT_THAT(HostTier::Create(budget),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("host.budget")));
}

TEST(HostTierTest, NeighboursMemoryIsInTheSameBudget) {
  ByteBudget budget(1 << 20);
  ASSERT_OK_AND_ASSIGN(const auto tier, HostTier::Create(budget));
  const RecordGeometry geometry = MakeGeometry(2, 2, 16384);
  const uint64_t cost_bytes = CostIn(*tier, geometry.size());

  ASSERT_TRUE(budget.TryCharge((1 << 20) - cost_bytes + 1));

  EXPECT_THAT(WriteBlock(*tier, {1, 0, 0}, geometry),
              StatusIs(absl::StatusCode::kResourceExhausted));
  budget.Release(1);
  EXPECT_OK(WriteBlock(*tier, {1, 0, 0}, geometry));
  EXPECT_EQ(tier->Usage().used_bytes, 1u << 20);
  EXPECT_FALSE(budget.TryCharge(1));
}

TEST(HostTierTest, EqualBlocksFillTheBudgetToTheLast) {
  ByteBudget budget(1 << 20);
  ASSERT_OK_AND_ASSIGN(const auto tier, HostTier::Create(budget));
  const RecordGeometry geometry = MakeGeometry(2, 2, 16384);
  const uint64_t fitting = (1 << 20) / CostIn(*tier, geometry.size());

  for (uint32_t block = 0; block < fitting; ++block) {
    ASSERT_OK(WriteBlock(*tier, {1, block, 0}, geometry));
  }
  // Every second leaves and comes again: equal sizes leave no gaps.
  for (uint32_t block = 0; block < fitting; block += 2) {
    const BlockKey key = {1, block, 0};
    ASSERT_OK(tier->Erase({&key, 1}));
  }
  for (uint32_t block = 0; block < fitting; block += 2) {
    ASSERT_OK(WriteBlock(*tier, {2, block, 0}, geometry));
  }

  EXPECT_EQ(tier->Usage().blocks, fitting);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kMallocIsCounted = false;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr bool kMallocIsCounted = false;
#else
constexpr bool kMallocIsCounted = true;
#endif
#else
constexpr bool kMallocIsCounted = true;
#endif

void ExpectOverheadIsCovered(bool is_registered) {
  if (!kMallocIsCounted) GTEST_SKIP() << "this build's allocator does not count its bytes";
  ByteBudget budget(64 << 20);
  ASSERT_OK_AND_ASSIGN(const auto tier, HostTier::Create(budget));
  // As much as what a device's registration is kept in.
  if (is_registered) {
    tier->RegisterWith(
        [](std::span<std::byte>) { return std::make_shared<std::array<std::byte, 64>>(); });
  }
  const RecordGeometry geometry = MakeGeometry(1, 1, 8);
  const size_t before_bytes = mallinfo2().uordblks;

  for (uint32_t block = 0; block < 4000; ++block) {
    ASSERT_OK(WriteBlock(*tier, {1, block, 0}, geometry));
    // Scattered holes are the dearest for the extent maps.
    if (block % 3 == 1) {
      const BlockKey key = {1, block, 0};
      ASSERT_OK(tier->Erase({&key, 1}));
    }
    const uint64_t blocks = tier->Usage().blocks;
    const uint64_t charged_bytes = tier->Usage().used_bytes - blocks * geometry.record_bytes();
    if (blocks < 64) continue;  // Fixed parts weigh more than few records.
    ASSERT_LE(mallinfo2().uordblks - before_bytes, charged_bytes) << blocks << " blocks";
  }
}

TEST(HostTierTest, OverheadIsCovered) {
  ExpectOverheadIsCovered(/*is_registered=*/false);
}

TEST(HostTierTest, OverheadOfWhatIsRegisteredIsCovered) {
  ExpectOverheadIsCovered(/*is_registered=*/true);
}

}  // namespace
}  // namespace ebbtide::storage
