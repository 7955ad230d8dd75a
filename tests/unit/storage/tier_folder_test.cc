// SPDX-License-Identifier: Apache-2.0
//
// Whose folder it is, and what may be deleted in it.

#include "storage/rocksdb/tier_folder.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "storage/rocksdb/block_index.h"
#include "tests/support/faulty_file_calls.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::storage {
namespace {

namespace fs = std::filesystem;

using test::StatusIs;
using testing::AllOf;
using testing::HasSubstr;
using testing::UnorderedElementsAre;

class TierFolderTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<TierFolder>> Take() { return TierFolder::Take(path_, calls_); }

  void Touch(const fs::path& path) {
    fs::create_directories(path.parent_path());
    std::ofstream(path) << "text";
  }

  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(path_))
      names.push_back(entry.path().filename());
    return names;
  }

  test::TempFolder temp_;
  const fs::path path_ = temp_.path() / "state" / "tier";
  test::FaultyFileCalls calls_;
};

TEST_F(TierFolderTest, IsMadeForItsOwnerAlone) {
  ASSERT_OK_AND_ASSIGN(const auto folder, Take());

  EXPECT_EQ(fs::status(path_).permissions(), fs::perms::owner_all);
  EXPECT_THAT(Names(), UnorderedElementsAre("ebbtide.lock"));
  EXPECT_OK(folder->CheckOwned());
}

// As in /tmp, where anybody may make the folder first.
TEST_F(TierFolderTest, FolderOfAnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "not run: only root can give a folder to another user";
  constexpr uid_t kOwner = 12345;
  constexpr uid_t kSelf = 23456;
  fs::create_directories(path_);
  fs::permissions(temp_.path(), fs::perms::all);
  ASSERT_EQ(chown(path_.c_str(), kOwner, kOwner), 0);
  fs::permissions(path_, fs::perms::all);

  ASSERT_EQ(seteuid(kSelf), 0);
  const auto folder = Take();
  ASSERT_EQ(seteuid(0), 0);

  EXPECT_THAT(folder, StatusIs(absl::StatusCode::kFailedPrecondition,
                               AllOf(HasSubstr("uid 12345"), HasSubstr("uid 23456"))));
  EXPECT_THAT(Names(), testing::IsEmpty());
}

TEST_F(TierFolderTest, NothingIsMadeInAFolderOfAnotherUser) {
  if (geteuid() != 0) GTEST_SKIP() << "not run: only root can give a folder to another user";
  constexpr uid_t kOwner = 12345;
  constexpr uid_t kSelf = 23456;
  const fs::path parent = path_.parent_path();
  fs::create_directories(parent);
  fs::permissions(temp_.path(), fs::perms::all);
  ASSERT_EQ(chown(parent.c_str(), kOwner, kOwner), 0);
  fs::permissions(parent, fs::perms::all);

  ASSERT_EQ(seteuid(kSelf), 0);
  const auto folder = Take();
  ASSERT_EQ(seteuid(0), 0);

  EXPECT_THAT(folder, StatusIs(absl::StatusCode::kFailedPrecondition,
                               HasSubstr(parent.string() + " belongs to uid 12345")));
  EXPECT_FALSE(fs::exists(path_));
}

TEST_F(TierFolderTest, SecondOwnerIsRefusedWithFolderAndProcess) {
  ASSERT_OK_AND_ASSIGN(auto folder, Take());

  EXPECT_THAT(Take(), StatusIs(absl::StatusCode::kFailedPrecondition,
                               AllOf(HasSubstr(path_.string()),
                                     HasSubstr(absl::StrCat("pid ", getpid())))));
  folder.reset();
  EXPECT_OK(Take());
}

TEST_F(TierFolderTest, FolderWithFilesOfOthersIsLeftAsItIs) {
  Touch(path_ / "thesis.tex");
  Touch(path_ / "slots-4096-1");

  EXPECT_THAT(Take(), StatusIs(absl::StatusCode::kFailedPrecondition,
                               AllOf(HasSubstr("2 files that are not ours"),
                                     HasSubstr("thesis.tex"), HasSubstr("slots-4096-1"))));
  EXPECT_THAT(Names(), UnorderedElementsAre("thesis.tex", "slots-4096-1"));
}

// A start that was killed, or found the disk full, before it had written its lock.
TEST_F(TierFolderTest, EmptyLockAloneIsOurs) {
  fs::create_directories(path_);
  std::ofstream(path_ / "ebbtide.lock").close();
  EXPECT_OK(Take());

  std::ofstream(path_ / "ebbtide.lock", std::ios::trunc).close();
  Touch(path_ / "index" / "CURRENT");
  EXPECT_THAT(Take(), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("not ours")));
}

// The marker is never away, not even while it is written anew.
TEST_F(TierFolderTest, LockThatCannotBeWrittenAnewStaysOurs) {
  ASSERT_OK(Take());
  const rlimit none = {.rlim_cur = 0, .rlim_max = RLIM_INFINITY};
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
  const auto full = Take();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, handler);

  EXPECT_THAT(full, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("cannot write")));
  EXPECT_OK(Take());
}

TEST_F(TierFolderTest, NamesWithoutOurLockProveNothing) {
  Touch(path_ / "index" / "1" / "CURRENT");
  Touch(path_ / "ebbtide.lock");  // Not our text in it.

  EXPECT_THAT(Take(), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("index")));
  EXPECT_TRUE(fs::exists(path_ / "index" / "1" / "CURRENT"));
}

TEST_F(TierFolderTest, WhatAnEarlierRunLeftIsDeleted) {
  { ASSERT_OK(Take()); }
  Touch(path_ / "slots-720896-12");
  {  // A database as a killed process leaves it: copied while it was open.
    ASSERT_OK_AND_ASSIGN(const auto index, BlockIndex::Create(path_ / "built", nullptr));
    fs::copy(path_ / "built", path_ / "index", fs::copy_options::recursive);
  }
  fs::remove_all(path_ / "built");
  fs::create_directory(path_ / "lost+found");
  ASSERT_TRUE(fs::exists(path_ / "index" / "1" / "CURRENT"));

  ASSERT_OK_AND_ASSIGN(const auto folder, Take());

  EXPECT_THAT(Names(), UnorderedElementsAre("ebbtide.lock", "lost+found"));
}

TEST_F(TierFolderTest, StrangerAmongOurFilesStopsTheWipe) {
  { ASSERT_OK(Take()); }
  Touch(path_ / "slots-720896-12");
  Touch(path_ / "notes.txt");

  EXPECT_THAT(Take(), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("notes.txt")));
  EXPECT_TRUE(fs::exists(path_ / "slots-720896-12"));

  fs::remove(path_ / "notes.txt");
  Touch(path_ / "index" / "1" / "notes.txt");
  EXPECT_THAT(Take(), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("index/1")));
  EXPECT_TRUE(fs::exists(path_ / "index" / "1" / "notes.txt"));
}

TEST_F(TierFolderTest, SlotNamesAreOursOnlyAsWeWriteThem) {
  for (const char* name :
       {"slots-", "slots-1", "slots-1-", "slots-1-2x", "slots--2", "slots-1-2-3"}) {
    { ASSERT_OK(Take()); }
    Touch(path_ / name);
    EXPECT_THAT(Take(), StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr(name)));
    fs::remove(path_ / name);
  }
}

TEST_F(TierFolderTest, VanishedFolderIsSeenAndSoIsItsReturn) {
  ASSERT_OK_AND_ASSIGN(const auto folder, Take());

  fs::rename(path_, temp_.path() / "elsewhere");
  EXPECT_THAT(folder->CheckOwned(),
              StatusIs(absl::StatusCode::kUnavailable,
                       AllOf(HasSubstr(path_.string()), HasSubstr("vanished"))));

  Touch(path_ / "ebbtide.lock");  // Another folder in its place.
  EXPECT_THAT(folder->CheckOwned(), StatusIs(absl::StatusCode::kUnavailable));

  fs::remove_all(path_);
  fs::rename(temp_.path() / "elsewhere", path_);
  EXPECT_OK(folder->CheckOwned());
}

TEST_F(TierFolderTest, RefusedDirectIoIsToldApartFromAFullDisk) {
  {
    ASSERT_OK_AND_ASSIGN(const auto folder, Take());
    EXPECT_TRUE(folder->is_direct()) << "the machine's temporary folder refuses O_DIRECT";
  }
  calls_.refuse_direct = true;
  {
    ASSERT_OK_AND_ASSIGN(const auto folder, Take());
    EXPECT_FALSE(folder->is_direct());
  }
  calls_.refuse_direct = false;
  calls_.write_error = EINVAL;  // Some file systems refuse only here.
  {
    ASSERT_OK_AND_ASSIGN(const auto folder, Take());
    EXPECT_FALSE(folder->is_direct());
  }
  calls_.write_error = ENOSPC;
  EXPECT_THAT(Take(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("No space left")));
  EXPECT_THAT(Names(), UnorderedElementsAre("ebbtide.lock"));
}

TEST_F(TierFolderTest, FolderThatCannotBeMadeIsNamed) {
  Touch(temp_.path() / "file");

  EXPECT_THAT(TierFolder::Take(temp_.path() / "file" / "tier", calls_),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("file/tier")));
}

}  // namespace
}  // namespace ebbtide::storage
