// SPDX-License-Identifier: Apache-2.0
//
// What the kernel says of the arena: memory held is read from the descriptor, refusals are provoked
// in a child process (a seccomp filter, a file size limit).

#include "storage/host/shm_arena.h"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "base/log.h"
#include "tests/support/death_test.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::storage {
namespace {

using ShmArenaDeathTest = test::ThreadsafeDeathTest;

using test::StatusIs;

constexpr uint64_t kMiB = 1 << 20;

uint64_t HeldBytes(const ShmArena& arena) {
  struct stat status = {};
  EXPECT_EQ(fstat(arena.fd(), &status), 0);
  return static_cast<uint64_t>(status.st_blocks) * 512;
}

// gmock's Each takes a quarter of a second for a mebibyte.
bool AllAre(std::span<const std::byte> bytes, std::byte value) {
  return std::all_of(bytes.begin(), bytes.end(), [=](std::byte byte) { return byte == value; });
}

TEST(ShmArenaTest, TakesNoMemoryBeforeItIsFilled) {
  ASSERT_OK_AND_ASSIGN(const auto arena, ShmArena::Create(64 * kMiB));

  EXPECT_EQ(arena->name(), "memfd");
  EXPECT_EQ(arena->size(), 64 * kMiB);
  EXPECT_EQ(HeldBytes(*arena), 0u);
}

TEST(ShmArenaTest, FilledExtentHoldsItsBytesAndNoMore) {
  ASSERT_OK_AND_ASSIGN(const auto arena, ShmArena::Create(8 * kMiB));
  const Extent extent = {.offset = 2 * kMiB, .bytes = kMiB};
  const std::vector<std::byte> bytes(kMiB, std::byte{7});

  ASSERT_OK(arena->Fill(extent, bytes));

  EXPECT_TRUE(AllAre(arena->bytes(extent), std::byte{7}));
  EXPECT_EQ(HeldBytes(*arena), kMiB);
}

TEST(ShmArenaTest, DecommittedExtentReadsAsZerosAndHoldsNothing) {
  ASSERT_OK_AND_ASSIGN(const auto arena, ShmArena::Create(8 * kMiB));
  const Extent first = {.offset = 0, .bytes = kMiB};
  const Extent second = {.offset = kMiB, .bytes = kMiB};
  const std::vector<std::byte> bytes(kMiB, std::byte{7});
  ASSERT_OK(arena->Fill(first, bytes));
  ASSERT_OK(arena->Fill(second, bytes));

  arena->Decommit(first);

  EXPECT_EQ(HeldBytes(*arena), kMiB);
  EXPECT_TRUE(AllAre(arena->bytes(second), std::byte{7}));
  EXPECT_TRUE(AllAre(arena->bytes(first), std::byte{0}));
}

TEST(ShmArenaTest, NobodyCanChangeItsSize) {
  ASSERT_OK_AND_ASSIGN(const auto arena, ShmArena::Create(kMiB));

  EXPECT_EQ(ftruncate(arena->fd(), 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(ftruncate(arena->fd(), 2 * kMiB), -1);
  EXPECT_EQ(errno, EPERM);
}

TEST(ShmArenaTest, MoreAddressesThanThereAreIsRefused) {
  EXPECT_THAT(ShmArena::Create(uint64_t{1} << 60), StatusIs(absl::StatusCode::kResourceExhausted));
}

// Makes memfd_create answer EPERM for the rest of this process, as container runtimes may.
bool RefuseMemfd() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_memfd_create, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {.len = 4, .filter = filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

[[noreturn]] void UseArenaWithoutMemfd() {
  if (!RefuseMemfd()) std::_Exit(2);
  const auto arena = ShmArena::Create(8 * kMiB);
  if (!arena.ok() || (*arena)->fd() != -1) std::_Exit(3);
  const Extent extent = {.offset = kMiB, .bytes = kMiB};
  const std::vector<std::byte> bytes(kMiB, std::byte{9});
  if (!(*arena)->Fill(extent, bytes).ok()) std::_Exit(4);
  if ((*arena)->bytes(extent)[kMiB - 1] != std::byte{9}) std::_Exit(5);
  (*arena)->Decommit(extent);
  if ((*arena)->bytes(extent)[kMiB - 1] != std::byte{0}) std::_Exit(6);
  if (!FlushLog(absl::Seconds(30))) std::_Exit(7);
  std::fprintf(stderr, "arena is %s\n", std::string((*arena)->name()).c_str());
  std::_Exit(0);
}

TEST_F(ShmArenaDeathTest, WithoutMemfdItIsAnonymousMemoryAndSaysSo) {
  EXPECT_EXIT(UseArenaWithoutMemfd(), testing::ExitedWithCode(0),
              "memfd refused.*\n*.*arena is anonymous memory");
}

[[noreturn]] void FillPastTheLimit() {
  const auto arena = ShmArena::Create(8 * kMiB);
  const rlimit limit = {.rlim_cur = kMiB + kMiB / 2, .rlim_max = kMiB + kMiB / 2};
  if (!arena.ok() || setrlimit(RLIMIT_FSIZE, &limit) != 0) std::_Exit(2);
  std::signal(SIGXFSZ, SIG_IGN);
  const std::vector<std::byte> bytes(kMiB, std::byte{9});
  const absl::Status status = (*arena)->Fill({.offset = kMiB, .bytes = kMiB}, bytes);
  if (!absl::IsResourceExhausted(status)) std::_Exit(3);
  if (HeldBytes(**arena) != 0) std::_Exit(4);  // The half that was written is given back.
  if (!(*arena)->Fill({.offset = 0, .bytes = kMiB}, bytes).ok()) std::_Exit(5);
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::_Exit(0);
}

TEST_F(ShmArenaDeathTest, RefusedMemoryIsAStatusAndLeavesNothingBehind) {
  EXPECT_EXIT(FillPastTheLimit(), testing::ExitedWithCode(0),
              "taking memory of 1048576 B: File too large");
}

}  // namespace
}  // namespace ebbtide::storage
