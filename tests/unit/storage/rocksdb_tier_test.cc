// SPDX-License-Identifier: Apache-2.0
//
// What the RocksDB tier promises beyond the tier contract: its disk use, its faults, its folder.

#include "storage/rocksdb/rocksdb_tier.h"

#include <sys/mount.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "base/executor.h"
#include "storage/block_record.h"
#include "storage/rocksdb/rocksdb_options.h"
#include "tests/support/death_test.h"
#include "tests/support/disk_use.h"
#include "tests/support/faulty_file_calls.h"
#include "tests/support/faulty_rocksdb_env.h"
#include "tests/support/random_seed.h"
#include "tests/support/record_pattern.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::storage {
namespace {

using RocksdbTierDeathTest = test::ThreadsafeDeathTest;

namespace fs = std::filesystem;

using test::DiskState;
using test::MakeGeometry;
using test::MakeRecord;
using test::PatternPage;
using test::StatusIs;
using testing::AllOf;
using testing::HasSubstr;

constexpr uint64_t kMiB = uint64_t{1} << 20;

absl::Status WriteBlock(Tier& tier, const BlockKey& key, const RecordGeometry& geometry,
                        uint64_t salt = 0) {
  const std::vector<std::byte> record = MakeRecord(key, geometry, salt);
  const BlockWrite write = {.key = key, .record = record};
  return tier.Write({&write, 1});
}

// Whether every page of the block is what `salt` wrote; kMissing where none is held.
PageState StateOf(Tier& tier, const BlockKey& key, const RecordGeometry& geometry,
                  uint64_t salt = 0) {
  std::vector<std::vector<std::byte>> bytes(geometry.pages(),
                                            std::vector<std::byte>(geometry.page_bytes));
  std::vector<PageRead> reads;
  for (uint32_t page = 0; page < geometry.pages(); ++page) {
    reads.push_back({.key = key, .page = page, .into = bytes[page]});
  }
  EXPECT_OK(tier.Read(reads, absl::InfiniteDuration()));
  for (const PageRead& read : reads) {
    if (read.state != PageState::kOk) return read.state;
    if (bytes[read.page] != PatternPage(key, read.page, geometry.page_bytes, salt)) {
      ADD_FAILURE() << key.DebugString() << ": page " << read.page << " is another's";
    }
  }
  return PageState::kOk;
}

class RocksdbTierTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<RocksdbTier>> Open(uint64_t budget_bytes) {
    return RocksdbTier::Create({.folder = path_,
                                .budget_bytes = budget_bytes,
                                .io = &io_,
                                .calls = &calls_,
                                .env = env_.get()});
  }

  absl::Status Write(const BlockKey& key, uint64_t salt = 0) {
    return WriteBlock(*tier_, key, geometry_, salt);
  }
  PageState State(const BlockKey& key, uint64_t salt = 0) {
    return StateOf(*tier_, key, geometry_, salt);
  }
  absl::Status Erase(const BlockKey& key) { return tier_->Erase({&key, 1}); }

  test::TempFolder temp_;
  const fs::path path_ = temp_.path() / "tier";
  test::FaultyFileCalls calls_;
  std::atomic<DiskState> index_disk_ = DiskState::kWell;
  std::unique_ptr<rocksdb::Env> env_ = test::MakeFaultyRocksdbEnv(&index_disk_);
  ParallelFor io_{2};
  const RecordGeometry geometry_ = MakeGeometry(2, 2, 16384);
  std::unique_ptr<RocksdbTier> tier_ = *Open(kIndexHeadroomBytes + 8 * kMiB);
};

TEST_F(RocksdbTierTest, BudgetBelowTheIndexHeadroomIsRefused) {
  tier_.reset();

  EXPECT_THAT(Open(kIndexHeadroomBytes),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("rocksdb.budget")));
}

TEST_F(RocksdbTierTest, SecondTierOnTheFolderIsRefused) {
  EXPECT_THAT(Open(64 * kMiB), StatusIs(absl::StatusCode::kFailedPrecondition,
                                        AllOf(HasSubstr(path_.string()), HasSubstr("pid"))));
}

TEST_F(RocksdbTierTest, NothingIsLeftOnDiskAfterACleanEnd) {
  ASSERT_OK(Write({1, 0, 0}));

  tier_.reset();

  for (const auto& entry : fs::recursive_directory_iterator(path_)) {
    EXPECT_TRUE(entry.path().filename() == "ebbtide.lock" || entry.is_directory()) << entry.path();
  }
}

[[noreturn]] void WriteAndDie(const fs::path& path) {
  const auto tier = RocksdbTier::Create(
      {.folder = path, .budget_bytes = 64 * kMiB, .io = nullptr, .calls = nullptr, .env = nullptr});
  const RecordGeometry geometry = MakeGeometry(2, 2, 16384);
  if (!tier.ok() || !WriteBlock(**tier, {1, 0, 0}, geometry).ok()) _exit(2);
  if (StateOf(**tier, {1, 0, 0}, geometry) != PageState::kOk) _exit(3);
  _exit(0);  // As a kill would: nothing is flushed, nothing deleted.
}

TEST_F(RocksdbTierDeathTest, StartsEmptyAfterAKill) {
  // The child runs this test from its start and finds its parent's folder here.
  const test::TempFolder temp;
  setenv("EBBTIDE_TEST_FOLDER", temp.path().c_str(), /*overwrite=*/0);
  const fs::path path = fs::path(std::getenv("EBBTIDE_TEST_FOLDER")) / "tier";
  EXPECT_EXIT(WriteAndDie(path), testing::ExitedWithCode(0), "");
  unsetenv("EBBTIDE_TEST_FOLDER");
  ASSERT_GT(test::DiskUseBytes(path), 68u * 1024);

  {
    ASSERT_OK_AND_ASSIGN(const auto tier, RocksdbTier::Create({.folder = path,
                                                               .budget_bytes = 64 * kMiB,
                                                               .io = nullptr,
                                                               .calls = nullptr,
                                                               .env = nullptr}));
    EXPECT_EQ(StateOf(*tier, {1, 0, 0}, MakeGeometry(2, 2, 16384)), PageState::kMissing);
    EXPECT_EQ(tier->Usage().blocks, 0u);
  }
}

TEST_F(RocksdbTierTest, FullDiskRefusesWritesAndNothingElse) {
  ASSERT_OK(Write({1, 0, 0}));
  calls_.allocate_error = ENOSPC;
  uint32_t block = 1;
  absl::Status status;
  while ((status = Write({1, block, 0})).ok()) ++block;  // What is left of the segment.

  EXPECT_THAT(status, StatusIs(absl::StatusCode::kUnavailable,
                               AllOf(HasSubstr(path_.string()), HasSubstr(std::strerror(ENOSPC)))));
  EXPECT_EQ(State({1, 0, 0}), PageState::kOk);
  EXPECT_EQ(State({1, block, 0}), PageState::kMissing);
  EXPECT_EQ(tier_->Usage().blocks, block);

  calls_.allocate_error = 0;
  ASSERT_OK(Write({1, block, 0}));
  EXPECT_EQ(State({1, block, 0}), PageState::kOk);
}

TEST_F(RocksdbTierTest, WriteThatMemoryRanOutForTakesNothing) {
  ASSERT_OK(Write({1, 0, 0}));
  const TierUsage before = tier_->Usage();
  calls_.write_throws = true;
  for (uint32_t i = 0; i < 100; ++i) EXPECT_THROW((void)Write({1, 1, 0}), std::bad_alloc);
  calls_.write_throws = false;

  EXPECT_EQ(tier_->Usage().used_bytes, before.used_bytes);
  EXPECT_EQ(tier_->Usage().blocks, before.blocks);
  EXPECT_EQ(State({1, 1, 0}), PageState::kMissing);
  EXPECT_OK(Write({1, 1, 0}));
  EXPECT_EQ(State({1, 1, 0}), PageState::kOk);
}

TEST_F(RocksdbTierTest, WriteThatFailsHalfWayLeavesTheOlderRecord) {
  ASSERT_OK(Write({1, 0, 0}, /*salt=*/1));
  const uint64_t used_bytes = tier_->Usage().used_bytes;

  for (const int error : {EIO, ENOSPC}) {
    calls_.write_error = error;
    EXPECT_THAT(Write({1, 0, 0}, /*salt=*/2),
                StatusIs(absl::StatusCode::kUnavailable,
                         AllOf(HasSubstr(path_.string()), HasSubstr(std::strerror(error)))));
    EXPECT_FALSE(Write({2, 0, 0}).ok());
    calls_.write_error = 0;
    EXPECT_EQ(State({1, 0, 0}, /*salt=*/1), PageState::kOk);
    EXPECT_EQ(State({2, 0, 0}), PageState::kMissing);
    EXPECT_EQ(tier_->Usage().used_bytes, used_bytes);
  }
  ASSERT_OK(Write({1, 0, 0}, /*salt=*/2));
  EXPECT_EQ(State({1, 0, 0}, /*salt=*/2), PageState::kOk);
}

TEST_F(RocksdbTierTest, FailedReadIsUnavailableNotCorrupt) {
  ASSERT_OK(Write({1, 0, 0}));
  calls_.read_error = EIO;
  std::vector<std::byte> bytes(geometry_.page_bytes);
  PageRead read = {.key = {1, 0, 0}, .page = 1, .into = bytes};

  EXPECT_THAT(tier_->Read({&read, 1}, absl::InfiniteDuration()),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr(path_.string()), HasSubstr("Input/output error"))));
  EXPECT_EQ(tier_->Usage().corrupt_pages, 0u);
  calls_.read_error = 0;
  EXPECT_EQ(State({1, 0, 0}), PageState::kOk);
}

TEST_F(RocksdbTierTest, IndexHealsOnceItsDiskDoes) {
  for (const DiskState fault : {DiskState::kFull, DiskState::kBroken}) {
    ASSERT_OK(Write({1, 0, 0}, /*salt=*/1));
    ASSERT_OK(Write({2, 0, 0}));
    const uint64_t used_bytes = tier_->Usage().used_bytes;
    index_disk_ = fault;

    for (int attempt = 0; attempt < 3; ++attempt) {
      EXPECT_THAT(Write({1, 0, 0}, /*salt=*/2),
                  StatusIs(absl::StatusCode::kUnavailable, HasSubstr(path_.string())));
      EXPECT_THAT(Erase({2, 0, 0}), StatusIs(absl::StatusCode::kUnavailable));
    }
    EXPECT_EQ(State({1, 0, 0}, /*salt=*/1), PageState::kOk);
    EXPECT_EQ(State({2, 0, 0}), PageState::kOk);
    EXPECT_EQ(tier_->Usage().used_bytes, used_bytes);
    EXPECT_EQ(tier_->Usage().blocks, 2u);

    index_disk_ = DiskState::kWell;
    EXPECT_THAT(Erase({2, 0, 0}), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("probe")));
    ASSERT_OK(Write({1, 0, 0}, /*salt=*/2));
    ASSERT_OK(Erase({2, 0, 0}));
    EXPECT_EQ(State({1, 0, 0}, /*salt=*/2), PageState::kOk);
    EXPECT_EQ(State({2, 0, 0}), PageState::kMissing);
  }
}

TEST_F(RocksdbTierTest, VanishedFolderStopsWritesUntilItIsBack) {
  ASSERT_OK(Write({1, 0, 0}));
  fs::rename(path_, temp_.path() / "elsewhere");

  EXPECT_THAT(Write({2, 0, 0}), StatusIs(absl::StatusCode::kUnavailable,
                                         AllOf(HasSubstr(path_.string()), HasSubstr("vanished"))));
  EXPECT_EQ(State({1, 0, 0}), PageState::kOk) << "open files are read on";

  fs::rename(temp_.path() / "elsewhere", path_);
  ASSERT_OK(Write({2, 0, 0}));
  EXPECT_EQ(State({2, 0, 0}), PageState::kOk);
}

TEST_F(RocksdbTierTest, BlocksErasedInAVanishedFolderStayChargedUntilItIsBack) {
  ASSERT_OK(Write({1, 0, 0}));
  const uint64_t used_bytes = tier_->Usage().used_bytes;
  fs::rename(path_, temp_.path() / "elsewhere");

  EXPECT_THAT(Erase({1, 0, 0}), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("vanished")));

  EXPECT_EQ(State({1, 0, 0}), PageState::kMissing);
  EXPECT_EQ(tier_->Usage().used_bytes, used_bytes);
  fs::rename(temp_.path() / "elsewhere", path_);
  EXPECT_OK(tier_->Probe());
  EXPECT_LT(tier_->Usage().used_bytes, used_bytes);
}

TEST_F(RocksdbTierTest, DeletedFolderNeverBringsTheProcessDown) {
  ASSERT_OK(Write({1, 0, 0}));
  fs::remove_all(path_);

  EXPECT_THAT(Write({2, 0, 0}), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(State({1, 0, 0}), PageState::kOk);
  EXPECT_OK(Erase({1, 0, 0}));
  EXPECT_EQ(State({1, 0, 0}), PageState::kMissing);
}

TEST_F(RocksdbTierTest, CutSlotFileIsALossUntilTheBlockIsWrittenAgain) {
  ASSERT_OK(Write({1, 0, 0}));
  for (const auto& entry : fs::directory_iterator(path_)) {
    if (entry.path().filename().string().starts_with("slots-")) fs::resize_file(entry.path(), 0);
  }

  EXPECT_EQ(State({1, 0, 0}), PageState::kCorrupt);
  ASSERT_OK(Write({1, 0, 0}));
  EXPECT_EQ(State({1, 0, 0}), PageState::kOk);
}

TEST_F(RocksdbTierTest, NeighbouringPagesAreOneRead) {
  const RecordGeometry geometry = MakeGeometry(8, 4, 16384);
  ASSERT_OK(WriteBlock(*tier_, {1, 0, 0}, geometry));
  std::vector<std::byte> bytes(geometry.page_bytes);
  PageRead one = {.key = {1, 0, 0}, .page = 31, .into = bytes};

  calls_.reads = 0;
  ASSERT_EQ(StateOf(*tier_, {1, 0, 0}, geometry), PageState::kOk);
  EXPECT_EQ(calls_.reads, 1);
  ASSERT_OK(tier_->Read({&one, 1}, absl::InfiniteDuration()));
  EXPECT_EQ(calls_.reads, 2);
}

// Three sizes come and go, and the index compacts meanwhile: du never passes what Usage says.
TEST_F(RocksdbTierTest, DiskUseIsWithinUsage) {
  const uint64_t seed = test::RandomSeed();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  tier_.reset();
  ASSERT_OK_AND_ASSIGN(tier_, Open(96 * kMiB));
  const std::vector<RecordGeometry> geometries = {
      MakeGeometry(32, 8, 512), MakeGeometry(16, 8, 1024), MakeGeometry(4, 4, 16384)};
  std::vector<BlockKey> held;
  for (uint32_t block = 0; block < 6000; ++block) {
    const BlockKey key = {1, block, 0};
    const absl::Status status = WriteBlock(*tier_, key, geometries[random() % 3]);
    if (status.ok()) {
      held.push_back(key);
    } else {
      ASSERT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted));
    }
    while (held.size() > 150 + random() % 100 || (!status.ok() && held.size() > 100)) {
      std::swap(held[random() % held.size()], held.back());
      ASSERT_OK(Erase(held.back()));
      held.pop_back();
    }
    if (block % 50 != 0) continue;
    const uint64_t used_before = tier_->Usage().used_bytes;
    const uint64_t disk_bytes = test::DiskUseBytes(path_);
    ASSERT_LE(disk_bytes, used_before) << "after " << block << " blocks";
    ASSERT_LE(used_before, 96 * kMiB);
  }
}

// A file system of its own, so that the disk is really full: slot files, index and logs alike.
class RocksdbTierOnSmallDisk : public testing::Test {
 protected:
  void SetUp() override {
    if (mount("tmpfs", temp_.path().c_str(), "tmpfs", 0, "size=24m") != 0) {
      GTEST_SKIP() << "a tmpfs cannot be mounted: " << std::strerror(errno);
    }
    is_mounted_ = true;
  }
  void TearDown() override {
    if (is_mounted_) umount2(temp_.path().c_str(), MNT_DETACH);
  }

  test::TempFolder temp_;
  bool is_mounted_ = false;
};

TEST_F(RocksdbTierOnSmallDisk, EveryAcknowledgedBlockIsWholeWhenTheDiskIsFull) {
  ASSERT_OK_AND_ASSIGN(const auto tier, RocksdbTier::Create({.folder = temp_.path() / "tier",
                                                             .budget_bytes = 256 * kMiB,
                                                             .io = nullptr,
                                                             .calls = nullptr,
                                                             .env = nullptr}));
  const RecordGeometry geometry = MakeGeometry(4, 4, 16384);
  std::vector<uint32_t> acknowledged;
  int refused = 0;
  for (uint32_t block = 0; block < 400 && refused < 50; ++block) {
    const absl::Status status = WriteBlock(*tier, {1, block, 0}, geometry);
    if (status.ok()) {
      acknowledged.push_back(block);
    } else {
      ASSERT_THAT(status, StatusIs(absl::StatusCode::kUnavailable));
      ++refused;
    }
  }
  ASSERT_EQ(refused, 50) << "24 MiB took " << acknowledged.size() << " blocks of 260 KiB";
  ASSERT_GE(acknowledged.size(), 40u);

  for (const uint32_t block : acknowledged) {
    EXPECT_EQ(StateOf(*tier, {1, block, 0}, geometry), PageState::kOk) << block;
  }
  // Room is made, and writes go on without a restart.
  for (const uint32_t block : acknowledged) {
    const BlockKey key = {1, block, 0};
    ASSERT_OK(tier->Erase({&key, 1}));
  }
  for (uint32_t block = 0; block < 16; ++block) {
    ASSERT_OK(WriteBlock(*tier, {2, block, 0}, geometry));
    EXPECT_EQ(StateOf(*tier, {2, block, 0}, geometry), PageState::kOk);
  }
}

// Random calls with faults coming and going, against a plain map of what was acknowledged.
class RocksdbTierModelTest : public RocksdbTierTest {
 protected:
  void DrawFaults(std::mt19937_64& random) {
    const auto draw = [&](int error) { return random() % 4 == 0 ? error : 0; };
    const bool is_well = random() % 2 == 0;
    calls_.allocate_error = is_well ? 0 : draw(ENOSPC);
    calls_.write_error = is_well ? 0 : draw(random() % 2 == 0 ? EIO : ENOSPC);
    calls_.open_error = is_well ? 0 : draw(EMFILE);
    calls_.short_transfers = random() % 2 == 0;
    index_disk_ = is_well || random() % 4 != 0 ? DiskState::kWell
                  : random() % 2 == 0          ? DiskState::kFull
                                               : DiskState::kBroken;
  }

  struct Written {
    size_t geometry;
    uint64_t salt;
  };
  using Model = std::map<BlockKey, Written>;

  void WriteRandom(Model& model, std::mt19937_64& random) {
    const BlockKey key = {1 + random() % 2, static_cast<uint32_t>(random() % 12), 0};
    const Written written = {.geometry = random() % 3, .salt = random()};
    const absl::Status status =
        WriteBlock(*tier_, key, geometries_[written.geometry], written.salt);
    if (status.ok()) {
      model[key] = written;
    } else {
      EXPECT_THAT(status.code(), testing::AnyOf(absl::StatusCode::kResourceExhausted,
                                                absl::StatusCode::kUnavailable));
    }
  }

  void EraseRandom(Model& model, std::mt19937_64& random) {
    const BlockKey key = {1 + random() % 2, static_cast<uint32_t>(random() % 12), 0};
    if (Erase(key).ok()) model.erase(key);
  }

  void ExpectAgrees(const Model& model) {
    for (uint64_t sequence = 1; sequence < 3; ++sequence) {
      for (uint32_t block = 0; block < 12; ++block) {
        const BlockKey key = {sequence, block, 0};
        const auto found = model.find(key);
        const PageState state =
            found == model.end()
                ? State(key)
                : StateOf(*tier_, key, geometries_[found->second.geometry], found->second.salt);
        ASSERT_EQ(state, found == model.end() ? PageState::kMissing : PageState::kOk)
            << key.DebugString();
      }
    }
    ASSERT_EQ(tier_->Usage().blocks, model.size());
    ASSERT_LE(tier_->Usage().used_bytes, tier_->Usage().budget_bytes);
  }

  const std::vector<RecordGeometry> geometries_ = {
      MakeGeometry(2, 2, 16384), MakeGeometry(3, 2, 10240), MakeGeometry(8, 4, 4096)};
};

TEST_F(RocksdbTierModelTest, RandomCallsUnderFaultsAgreeWithAMap) {
  test::ForEachSeed(4, [this](uint64_t seed) {
    std::mt19937_64 random(seed);
    Model model;
    for (int step = 0; step < 250; ++step) {
      if (random() % 8 == 0) DrawFaults(random);
      if (random() % 16 == 0) tier_->Probe().IgnoreError();
      if (random() % 3 != 0) {
        WriteRandom(model, random);
      } else {
        EraseRandom(model, random);
      }
      if (step % 25 == 0) ExpectAgrees(model);
      if (testing::Test::HasFatalFailure()) return;
    }
    calls_.allocate_error = calls_.write_error = calls_.open_error = 0;
    index_disk_ = DiskState::kWell;
    ExpectAgrees(model);
    ASSERT_OK(tier_->Probe());
    for (const auto& [key, written] : model) ASSERT_OK(Erase(key));
    ASSERT_EQ(tier_->Usage().used_bytes, kIndexHeadroomBytes);
  });
}

}  // namespace
}  // namespace ebbtide::storage
