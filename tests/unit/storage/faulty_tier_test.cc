// SPDX-License-Identifier: Apache-2.0
//
// The faults that other tests rely on do happen, are the same for the same seed, and end when told.

#include "tests/support/faulty_tier.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "storage/byte_budget.h"
#include "storage/host/host_tier.h"
#include "tests/support/record_pattern.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::storage {
namespace {

using test::FaultyTier;
using test::MakeGeometry;
using test::MakeRecord;
using test::StatusIs;

class FaultyTierTest : public testing::Test {
 protected:
  absl::Status Write(Tier& tier, uint32_t block) {
    const BlockKey key = {1, block, 0};
    const std::vector<std::byte> record = MakeRecord(key, geometry_);
    const BlockWrite write = {.key = key, .record = record};
    return tier.Write({&write, 1});
  }

  int CorruptPages(Tier& tier, uint32_t block) {
    int corrupt = 0;
    std::vector<std::byte> bytes(geometry_.page_bytes);
    for (uint32_t page = 0; page < geometry_.pages(); ++page) {
      PageRead read = {.key = {1, block, 0}, .page = page, .into = bytes};
      EXPECT_OK(tier.Read({&read, 1}, absl::InfiniteDuration()));
      corrupt += read.state == PageState::kCorrupt ? 1 : 0;
    }
    return corrupt;
  }

  const RecordGeometry geometry_ = MakeGeometry(2, 2, 4096);
  ByteBudget budget_{8 << 20};
  std::unique_ptr<HostTier> host_ = *HostTier::Create(budget_);
  FaultyTier faulty_{*host_, /*seed=*/1};
};

TEST_F(FaultyTierTest, StartsWithoutFaults) {
  ASSERT_OK(Write(faulty_, 0));

  EXPECT_EQ(CorruptPages(faulty_, 0), 0);
  EXPECT_EQ(faulty_.damaged_records(), 0u);
}

TEST_F(FaultyTierTest, RefusesEveryCallThatMayFail) {
  faulty_.Set({.refuse = 1});
  const BlockKey key = {1, 0, 0};

  EXPECT_THAT(Write(faulty_, 0), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(faulty_.Read({}, absl::InfiniteDuration()), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(faulty_.Erase({&key, 1}), StatusIs(absl::StatusCode::kUnavailable));
  faulty_.Set({});
  EXPECT_OK(Write(faulty_, 0));
}

TEST_F(FaultyTierTest, FullRefusesWritesAlone) {
  faulty_.Set({.full = 1});

  EXPECT_THAT(Write(faulty_, 0), StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_OK(faulty_.Read({}, absl::InfiniteDuration()));
  EXPECT_OK(faulty_.Probe());
}

TEST_F(FaultyTierTest, DelayRunsBeforeTheCall) {
  int delays = 0;
  faulty_.Set({.delay = 1, .on_delay = [&] { ++delays; }});

  ASSERT_OK(Write(faulty_, 0));
  ASSERT_OK(faulty_.Read({}, absl::InfiniteDuration()));

  EXPECT_EQ(delays, 2);
}

TEST_F(FaultyTierTest, TornAndFlippedBytesAreCorruptPages) {
  faulty_.Set({.torn = 1});
  ASSERT_OK(Write(faulty_, 0));
  faulty_.Set({.flipped = 1});
  ASSERT_OK(Write(faulty_, 1));
  faulty_.Set({});
  ASSERT_OK(Write(faulty_, 2));

  EXPECT_GE(CorruptPages(faulty_, 0), 1);
  EXPECT_EQ(CorruptPages(faulty_, 1), 1);
  EXPECT_EQ(CorruptPages(faulty_, 2), 0);
  EXPECT_EQ(faulty_.damaged_records(), 2u);
}

TEST_F(FaultyTierTest, SameSeedGivesTheSameFaults) {
  FaultyTier again(*host_, /*seed=*/1);
  FaultyTier other(*host_, /*seed=*/2);
  std::vector<std::vector<bool>> refused(3);
  size_t which = 0;
  for (FaultyTier* tier : {&faulty_, &again, &other}) {
    tier->Set({.refuse = 0.5});
    for (int call = 0; call < 64; ++call)
      refused[which].push_back(!tier->Read({}, absl::InfiniteDuration()).ok());
    ++which;
  }

  EXPECT_EQ(refused[0], refused[1]);
  EXPECT_NE(refused[0], refused[2]);
}

}  // namespace
}  // namespace ebbtide::storage
