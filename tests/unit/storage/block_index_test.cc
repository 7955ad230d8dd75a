// SPDX-License-Identifier: Apache-2.0
//
// Entries come back as they were put, and the index takes writes again once its disk does.

#include "storage/rocksdb/block_index.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "storage/rocksdb/rocksdb_options.h"
#include "tests/support/disk_use.h"
#include "tests/support/faulty_rocksdb_env.h"
#include "tests/support/random_seed.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::storage {
namespace {

using test::DiskState;
using test::StatusIs;
using testing::HasSubstr;

std::vector<std::byte> Bytes(size_t size, uint8_t value) {
  return std::vector<std::byte>(size, std::byte{value});
}

class BlockIndexTest : public testing::Test {
 protected:
  std::optional<BlockEntry> Get(const BlockKey& key) const {
    const auto entry = index_->Get(key);
    EXPECT_OK(entry);
    return entry.ok() ? *entry : std::nullopt;
  }

  test::TempFolder folder_;
  std::atomic<DiskState> disk_ = DiskState::kWell;
  std::unique_ptr<rocksdb::Env> env_ = test::MakeFaultyRocksdbEnv(&disk_);
  std::unique_ptr<BlockIndex> index_ = *BlockIndex::Create(folder_.path() / "index", env_.get());
};

TEST_F(BlockIndexTest, EntryComesBackAsItWasPut) {
  const BlockKey key = {.sequence = ~uint64_t{0}, .block = 7, .generation = ~uint32_t{0}};
  ASSERT_OK(index_->Put(key, {.segment = 3, .slot = 9}, Bytes(2500, 4)));

  const std::optional<BlockEntry> entry = Get(key);

  ASSERT_TRUE(entry.has_value());
  EXPECT_EQ(entry->place, (SlotPlace{.segment = 3, .slot = 9}));
  EXPECT_EQ(entry->header, Bytes(2500, 4));
}

TEST_F(BlockIndexTest, LaterPutWinsAndDeleteForgets) {
  ASSERT_OK(index_->Put({1, 0, 0}, {.segment = 1, .slot = 1}, Bytes(10, 1)));
  ASSERT_OK(index_->Put({1, 0, 0}, {.segment = 2, .slot = 2}, Bytes(20, 2)));
  ASSERT_OK(index_->Put({1, 0, 1}, {.segment = 4, .slot = 4}, Bytes(10, 4)));
  EXPECT_EQ(Get({1, 0, 0})->place, (SlotPlace{.segment = 2, .slot = 2}));

  ASSERT_OK(index_->Delete({1, 0, 0}));

  EXPECT_FALSE(Get({1, 0, 0}).has_value());
  EXPECT_EQ(Get({1, 0, 1})->place, (SlotPlace{.segment = 4, .slot = 4}));
  EXPECT_OK(index_->Delete({9, 9, 9}));
}

class BlockIndexFaultTest : public BlockIndexTest, public testing::WithParamInterface<DiskState> {};

TEST_P(BlockIndexFaultTest, TakesWritesAgainOnceTheDiskDoes) {
  ASSERT_OK(index_->Put({1, 0, 0}, {.segment = 1, .slot = 1}, Bytes(2000, 1)));
  disk_ = GetParam();

  EXPECT_THAT(
      index_->Put({2, 0, 0}, {.segment = 1, .slot = 2}, Bytes(2000, 2)),
      StatusIs(absl::StatusCode::kUnavailable, HasSubstr((folder_.path() / "index").string())));
  EXPECT_THAT(index_->Delete({1, 0, 0}), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(index_->Rebuild(), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_TRUE(Get({1, 0, 0}).has_value()) << "reads go on";
  EXPECT_FALSE(Get({2, 0, 0}).has_value()) << "a refused put is not seen";

  disk_ = DiskState::kWell;

  ASSERT_OK(index_->Rebuild());
  EXPECT_OK(index_->Put({3, 0, 0}, {.segment = 1, .slot = 3}, Bytes(2000, 3)));
  EXPECT_TRUE(Get({1, 0, 0}).has_value());
  EXPECT_FALSE(Get({2, 0, 0}).has_value());
  EXPECT_TRUE(Get({3, 0, 0}).has_value());
}

TEST_P(BlockIndexFaultTest, FaultWhileMemtablesGoDownHealsToo) {
  // More than two memtables: the failing write is a flush in the background, not a put.
  for (uint32_t block = 0; block < 700; ++block) {
    ASSERT_OK(index_->Put({1, block, 0}, {.segment = 1, .slot = block}, Bytes(2500, 1)));
  }
  disk_ = GetParam();
  absl::Status status;
  for (uint32_t block = 700; status.ok() && block < 4000; ++block) {
    status = index_->Put({1, block, 0}, {.segment = 1, .slot = block}, Bytes(2500, 1));
  }
  EXPECT_FALSE(status.ok());

  disk_ = DiskState::kWell;

  ASSERT_OK(index_->Rebuild());
  for (uint32_t block = 0; block < 3000; ++block) {
    ASSERT_OK(index_->Put({2, block, 0}, {.segment = 1, .slot = block}, Bytes(2500, 1)));
  }
  for (uint32_t block = 0; block < 700; ++block) ASSERT_TRUE(Get({1, block, 0}).has_value());
}

INSTANTIATE_TEST_SUITE_P(EveryFault, BlockIndexFaultTest,
                         testing::Values(DiskState::kFull, DiskState::kBroken),
                         [](const auto& test) {
                           return test.param == DiskState::kFull ? "full" : "broken";
                         });

// Entries come and go as blocks do, newest and oldest mixed, while the database compacts.
TEST_F(BlockIndexTest, DiskUseStaysWithinItsChargeUnderChurn) {
  const uint64_t seed = test::RandomSeed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  constexpr uint32_t kHeld = 6000;
  constexpr uint64_t kHeaderBytes = 2400;  // A block of 256 pages.
  const std::vector<std::byte> header = Bytes(kHeaderBytes, 1);
  std::vector<BlockKey> held;
  for (uint32_t block = 0; block < 40000; ++block) {
    held.push_back({random() % 8, block, 0});
    ASSERT_OK(index_->Put(held.back(), {.segment = 1, .slot = block}, header));
    if (held.size() > kHeld) {
      std::swap(held[random() % held.size()], held.back());
      ASSERT_OK(index_->Delete(held.back()));
      held.pop_back();
    }
    if (block % 500 != 0) continue;
    ASSERT_LE(test::DiskUseBytes(folder_.path()),
              kIndexHeadroomBytes + held.size() * BlockIndex::EntryCostBytes(kHeaderBytes))
        << held.size() << " entries after " << block;
  }
}

TEST(BlockIndexOpenTest, FolderThatCannotBeMadeIsUnavailable) {
  EXPECT_THAT(BlockIndex::Create("/proc/ebbtide/index", nullptr),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("/proc/ebbtide")));
}

}  // namespace
}  // namespace ebbtide::storage
