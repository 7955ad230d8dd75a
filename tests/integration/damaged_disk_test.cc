// SPDX-License-Identifier: Apache-2.0
//
// A recorded model played to a real daemon while its disk is damaged underneath it: slot files with
// flipped bytes, slot files cut short, a file system without a free byte.

#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "ebbtide/client.h"
#include "tests/integration/daemon_stand.h"
#include "tests/integration/replay_stand.h"
#include "tests/support/comes_true.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::test {
namespace {

namespace fs = std::filesystem;
using cli::RunReport;
using testing::Contains;
using testing::ElementsAre;
using testing::Gt;
using testing::HasSubstr;
using testing::Pair;

class DamagedDiskTest : public testing::TestWithParam<const char*> {
 protected:
  // The host tier is as small as may be, so that blocks move down as others come.
  void Serve() {
    daemon_ = stand_.Serve(
        {"--config",
         stand_.WriteConfig("server: {listen: 'unix:" + stand_.path("e.sock") +
                            "', threads: 2}\ndevice: {budget: 8MiB}\nhost: {budget: 1MiB}\n" +
                            "rocksdb: {path: " + folder().string() + ", budget: 96MiB}\n")},
        &said_);
    auto client = client::Client::Connect(said_.value("target", "unix:/nowhere"));
    ASSERT_OK(client.status());
    client_ = std::make_unique<client::Client>(*std::move(client));
  }

  fs::path folder() const { return stand_.path("disk/rocksdb"); }

  std::vector<fs::path> SlotFiles() const {
    std::vector<fs::path> files;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder())) {
      if (entry.path().filename().string().starts_with("slots-")) files.push_back(entry.path());
    }
    return files;
  }

  client::TierStats Rocksdb() const {
    const auto stats = client_->GetStats();
    EXPECT_OK(stats.status());
    return stats->tiers.at(2);
  }

  // Plays the small trace; when its prompt is through, `at_prompt_end` happens.
  absl::StatusOr<RunReport> Play(const std::function<void()>& at_prompt_end) {
    const SmallTrace& small = TheSmallTrace();
    return cli::Play(
        *client_, {.trace = small.trace, .truths = small.truths},
        {.policy = "h2o", .recall = GetParam(), .budget = {.tokens = 48}, .chunk = 128},
        [&](uint64_t played) {
          if (played == small.trace.prompt_length) at_prompt_end();
          return absl::OkStatus();
        });
  }

  // Other sequences come, and what was in the host tier moves down to the disk.
  void PushDown() {
    const cli::Trace& trace = TheSmallTrace().trace;
    ASSERT_OK(client_->RegisterModel({.name = "filler", .geometry = trace.geometry()}).status());
    for (const char* name : {"filler 1", "filler 2"}) {
      ASSERT_OK_AND_ASSIGN(const client::Sequence filler,
                           client_->OpenSequence({.name = name,
                                                  .model = "filler",
                                                  .policy = "keydiff",
                                                  .budget = {.tokens = 48},
                                                  .chunk_tokens = 128}));
      for (uint64_t first : {0, 128}) {
        for (uint32_t layer = 0; layer < trace.layers.size(); ++layer) {
          ASSERT_OK(filler
                        .Append({.layer = layer, .phase = client::Phase::kPrefill},
                                {.first_index = first,
                                 .k = trace.layers[layer].k.View(first, 128),
                                 .v = trace.layers[layer].v.View(first, 128)})
                        .status());
        }
      }
    }
    ASSERT_TRUE(ComesTrue([&] { return Rocksdb().blocks >= 4; }));
  }

  DaemonStand stand_;
  nlohmann::json said_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<client::Client> client_;
};

void ExpectNamedLosses(const RunReport& run) {
  EXPECT_EQ(run.certificate_violations, 0U);
  EXPECT_EQ(run.byte_mismatches, 0U);
  EXPECT_GT(run.bytes_lost, 0U);
  EXPECT_GT(run.not_met, 0U);
  EXPECT_THAT(run.not_met_by_reason, ElementsAre(Pair("CORRUPT_PAGE", run.not_met)));
}

TEST_P(DamagedDiskTest, ASoundDiskMeetsEveryAnswer) {
  Serve();

  ASSERT_OK_AND_ASSIGN(const RunReport run, Play([&] { PushDown(); }));

  EXPECT_EQ(run.certificate_violations, 0U);
  EXPECT_EQ(run.byte_mismatches, 0U);
  EXPECT_EQ(run.bytes_lost, 0U);
  EXPECT_EQ(run.not_met, 0U);
  EXPECT_THAT(run.touched_bytes.by_tier, Contains(Pair("rocksdb", Gt(0))));
}

TEST_P(DamagedDiskTest, FlippedBytesAreNamedLosses) {
  Serve();

  ASSERT_OK_AND_ASSIGN(const RunReport run, Play([&] {
                         PushDown();
                         for (const fs::path& path : SlotFiles()) {
                           std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
                           for (uint64_t at = 3000; at < fs::file_size(path); at += 4096) {
                             file.seekg(static_cast<std::streamoff>(at));
                             const auto byte = static_cast<char>(file.get() ^ 0x40);
                             file.seekp(static_cast<std::streamoff>(at));
                             file.put(byte);
                           }
                         }
                         ::sync();
                       }));

  ExpectNamedLosses(run);
  EXPECT_GT(Rocksdb().corrupt_pages, 0U);
}

TEST_P(DamagedDiskTest, CutSlotFilesAreNamedLosses) {
  Serve();

  ASSERT_OK_AND_ASSIGN(const RunReport run, Play([&] {
                         PushDown();
                         for (const fs::path& path : SlotFiles()) fs::resize_file(path, 100'000);
                       }));

  ExpectNamedLosses(run);
  EXPECT_GT(Rocksdb().corrupt_pages, 0U);
}

// Somebody else's file takes the last byte of the file system: reads go on, and once it is gone the
// tier takes blocks again.
TEST_P(DamagedDiskTest, AFullFileSystemCostsNoByteAndHeals) {
  const std::string disk = stand_.path("disk");
  fs::create_directory(disk);
  if (mount("tmpfs", disk.c_str(), "tmpfs", 0, "size=96m") != 0) {
    GTEST_SKIP() << "a tmpfs cannot be mounted: " << std::strerror(errno);
  }
  const struct Unmount {
    const std::string& disk;
    ~Unmount() { umount2(disk.c_str(), MNT_DETACH); }
  } unmount{disk};
  Serve();
  const std::string ballast = disk + "/ballast";

  ASSERT_OK_AND_ASSIGN(
      const RunReport run, Play([&] {
        PushDown();
        std::ofstream file(ballast, std::ios::binary);
        const std::string chunk(4096, 'x');
        while (file.write(chunk.data(), static_cast<std::streamsize>(chunk.size())).flush()) {
        }
        EXPECT_EQ(fs::space(disk).available, 0U);
      }));

  EXPECT_EQ(run.certificate_violations, 0U);
  EXPECT_EQ(run.byte_mismatches, 0U);
  EXPECT_EQ(run.bytes_lost, 0U);
  EXPECT_EQ(run.not_met, 0U);
  // By now it may be well: the run's own files are deleted.
  EXPECT_TRUE(ComesTrue([&] {
    const std::string log = stand_.Stderr();
    return absl::StrContains(log, "tier is degraded") && absl::StrContains(log, "No space left");
  }));
  fs::remove(ballast);
  // The daemon asks the tier again once a second.
  ASSERT_TRUE(ComesTrue([&] { return !Rocksdb().degraded; }));
  ASSERT_OK_AND_ASSIGN(const RunReport healed, Play([] {}));
  EXPECT_EQ(healed.not_met, 0U);
  EXPECT_EQ(healed.bytes_lost, 0U);
}

INSTANTIATE_TEST_SUITE_P(Recall, DamagedDiskTest, testing::Values("bounded(0.02)", "exact"),
                         [](const auto& test) {
                           return std::string(test.param) == "exact" ? "Exact" : "Bounded";
                         });

}  // namespace
}  // namespace ebbtide::test
