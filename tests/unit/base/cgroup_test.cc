// SPDX-License-Identifier: Apache-2.0
//
// Each test builds the files that the kernel would show, in a folder of its own.

#include "base/cgroup.h"

#include <sched.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "base/executor.h"
#include "tests/support/temp_folder.h"

namespace ebbtide {
namespace {

using testing::Eq;
using testing::Optional;

constexpr uint64_t kGiB = uint64_t{1} << 30;

class CgroupTest : public testing::Test {
 protected:
  void Put(const std::string& file, const std::string& text) {
    const std::filesystem::path path = root_.path() / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }

  CgroupLimits Read() { return ReadCgroupLimits(root_.path()); }

  void MountVersion2() {
    Put("proc/self/mountinfo",
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
        "30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n");
  }

  void MountVersion1() {
    Put("proc/self/mountinfo",
        "31 22 0:27 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
        "32 22 0:28 / /sys/fs/cgroup/memory rw shared:10 - cgroup cgroup rw,memory\n");
  }

 private:
  test::TempFolder root_;
};

TEST_F(CgroupTest, WithoutGroupsNothingIsLimited) {
  const CgroupLimits limits = Read();

  EXPECT_EQ(limits.cpus, std::nullopt);
  EXPECT_EQ(limits.memory_bytes, std::nullopt);
}

TEST_F(CgroupTest, Version2GroupLimits) {
  MountVersion2();
  Put("proc/self/cgroup", "0::/pod/sidecar\n");
  Put("sys/fs/cgroup/pod/sidecar/cpu.max", "150000 100000\n");
  Put("sys/fs/cgroup/pod/sidecar/memory.max", "1073741824\n");

  const CgroupLimits limits = Read();

  EXPECT_THAT(limits.cpus, Optional(Eq(1.5)));
  EXPECT_THAT(limits.memory_bytes, Optional(Eq(kGiB)));
}

TEST_F(CgroupTest, Version2AncestorLimitsToo) {
  MountVersion2();
  Put("proc/self/cgroup", "0::/pod/sidecar\n");
  Put("sys/fs/cgroup/pod/cpu.max", "200000 100000\n");
  Put("sys/fs/cgroup/pod/memory.max", "1073741824\n");
  Put("sys/fs/cgroup/pod/sidecar/cpu.max", "max 100000\n");
  Put("sys/fs/cgroup/pod/sidecar/memory.max", "2147483648\n");

  const CgroupLimits limits = Read();

  EXPECT_THAT(limits.cpus, Optional(Eq(2.0)));
  EXPECT_THAT(limits.memory_bytes, Optional(Eq(kGiB)));
}

TEST_F(CgroupTest, Version2MaxIsNoLimit) {
  MountVersion2();
  Put("proc/self/cgroup", "0::/\n");
  Put("sys/fs/cgroup/cpu.max", "max 100000\n");
  Put("sys/fs/cgroup/memory.max", "max\n");

  const CgroupLimits limits = Read();

  EXPECT_EQ(limits.cpus, std::nullopt);
  EXPECT_EQ(limits.memory_bytes, std::nullopt);
}

TEST_F(CgroupTest, ContainerWithTheHostsPathReadsTheMount) {
  MountVersion2();
  Put("proc/self/cgroup", "0::/kubepods.slice/pod42/container7\n");
  Put("sys/fs/cgroup/cpu.max", "300000 100000\n");
  Put("sys/fs/cgroup/memory.max", "1073741824\n");

  const CgroupLimits limits = Read();

  EXPECT_THAT(limits.cpus, Optional(Eq(3.0)));
  EXPECT_THAT(limits.memory_bytes, Optional(Eq(kGiB)));
}

TEST_F(CgroupTest, MountOfASubtreeIsReadRelativeToIt) {
  Put("proc/self/mountinfo", "30 22 0:26 /pod /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  Put("proc/self/cgroup", "0::/pod/sidecar\n");
  Put("sys/fs/cgroup/sidecar/cpu.max", "50000 100000\n");

  EXPECT_THAT(Read().cpus, Optional(Eq(0.5)));
}

TEST_F(CgroupTest, Version1GroupLimits) {
  MountVersion1();
  Put("proc/self/cgroup", "4:memory:/sidecar\n2:cpu,cpuacct:/sidecar\n0::/elsewhere\n");
  Put("sys/fs/cgroup/cpu,cpuacct/sidecar/cpu.cfs_quota_us", "400000\n");
  Put("sys/fs/cgroup/cpu,cpuacct/sidecar/cpu.cfs_period_us", "100000\n");
  Put("sys/fs/cgroup/memory/sidecar/memory.limit_in_bytes", "1073741824\n");

  const CgroupLimits limits = Read();

  EXPECT_THAT(limits.cpus, Optional(Eq(4.0)));
  EXPECT_THAT(limits.memory_bytes, Optional(Eq(kGiB)));
}

TEST_F(CgroupTest, Version1UnlimitedIsNoLimit) {
  MountVersion1();
  Put("proc/self/cgroup", "4:memory:/\n2:cpu,cpuacct:/\n");
  Put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
  Put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
  Put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");

  const CgroupLimits limits = Read();

  EXPECT_EQ(limits.cpus, std::nullopt);
  EXPECT_EQ(limits.memory_bytes, std::nullopt);
}

TEST_F(CgroupTest, GarbageDoesNotLimit) {
  Put("proc/self/mountinfo", "no dash here\n - \n1 2 - cgroup2\n\n");
  Put("proc/self/cgroup", "::::\nword\n");
  EXPECT_EQ(Read().cpus, std::nullopt);

  MountVersion2();
  Put("sys/fs/cgroup/cpu.max", "many few\n");
  Put("sys/fs/cgroup/memory.max", "-5\n");
  EXPECT_EQ(Read().cpus, std::nullopt);
  EXPECT_EQ(Read().memory_bytes, std::nullopt);
}

TEST(MachineTest, ThereIsACpuAndMemory) {
  EXPECT_GE(AvailableCpus(), 1);
  EXPECT_GE(AvailableMemoryBytes(), size_t{1} << 20);
}

TEST(MachineTest, AffinityLimitsCpus) {
  cpu_set_t before;
  CPU_ZERO(&before);
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  int first = 0;
  while (!CPU_ISSET(first, &before)) {
    ++first;
  }
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);

  const int cpus = AvailableCpus();

  ASSERT_EQ(sched_setaffinity(0, sizeof before, &before), 0);
  EXPECT_EQ(cpus, 1);
}

}  // namespace
}  // namespace ebbtide
