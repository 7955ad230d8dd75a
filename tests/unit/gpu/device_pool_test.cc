// SPDX-License-Identifier: Apache-2.0
//
// Memory of the device and memory shared with it: what is given is whole and zeroed, what is
// refused says why and leaves nothing behind.

#include "gpu/cuda/device_pool.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/cuda/host_memory.h"
#include "tests/cuemu/device.h"
#include "tests/cuemu/runtime.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::gpu {
namespace {

using test::StatusIs;
using testing::AllOf;
using testing::HasSubstr;

constexpr size_t kMiB = size_t{1} << 20;

// With virtual memory or without.
class DevicePoolTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override { Find({.memory_bytes = 64 * kMiB}); }
  void TearDown() override {
    EXPECT_EQ(cuemu::DeviceBytesTaken(), 0U);
    EXPECT_EQ(cuemu::RangesReserved(), 0);
    cuemu::SetDevice({});
    cuemu::HealDevice();
  }

  void Find(cuemu::DeviceTraits traits) {
    traits.has_virtual_memory = GetParam();
    cuemu::SetDevice(traits);
    absl::StatusOr<CudaDevice> device = FindCudaDevice();
    ASSERT_OK(device);
    device_ = *std::move(device);
  }

  CudaDevice device_;
};
INSTANTIATE_TEST_SUITE_P(Kinds, DevicePoolTest, testing::Bool(), [](const auto& test) {
  return std::string(test.param ? "virtual_memory" : "plain");
});

TEST_P(DevicePoolTest, IsOneZeroedRangeOfManyChunks) {
  ASSERT_OK_AND_ASSIGN(DeviceBuffer buffer, AllocateDevicePool(device_, {13 * kMiB + 5, 4 * kMiB}));
  const std::span<std::byte> bytes = buffer.bytes();

  EXPECT_EQ(bytes.size(), 13 * kMiB + 5);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(bytes.data()) % (2 * kMiB), 0U);
  EXPECT_TRUE(std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{}; }));
  std::memset(bytes.data(), 0xA5, bytes.size());  // All of it may be written.
  EXPECT_GE(cuemu::DeviceBytesTaken(), 13 * kMiB + 5);
  EXPECT_LE(cuemu::DeviceBytesTaken(), 16 * kMiB);

  const DeviceBuffer second = *AllocateDevicePool(device_, {kMiB, 4 * kMiB});
  EXPECT_NE(second.bytes().data(), bytes.data());
  buffer = DeviceBuffer();
  EXPECT_LE(cuemu::DeviceBytesTaken(), 3 * kMiB + 5);
}

TEST_P(DevicePoolTest, FullDeviceSaysWhatIsFree) {
  ASSERT_OK_AND_ASSIGN(const DeviceBuffer first,
                       AllocateDevicePool(device_, {40 * kMiB, 4 * kMiB}));
  const size_t taken = cuemu::DeviceBytesTaken();

  EXPECT_THAT(AllocateDevicePool(device_, {30 * kMiB, 4 * kMiB}),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("30 MiB"), HasSubstr("of 64 MiB are free"),
                             HasSubstr("lower the device budget"))));

  EXPECT_EQ(cuemu::DeviceBytesTaken(), taken);  // Chunks that were there are given back.
  ASSERT_OK(AllocateDevicePool(device_, {16 * kMiB, 4 * kMiB}));
}

TEST_P(DevicePoolTest, MoreThanTheDeviceHasIsRefused) {
  EXPECT_THAT(AllocateDevicePool(device_, {.bytes = size_t{1} << 52}),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("64 MiB")));
}

TEST_P(DevicePoolTest, IsThereOnADeviceThatExportsNothing) {
  Find({.exports_files = false});
  EXPECT_OK(AllocateDevicePool(device_, {.bytes = kMiB}));
}

TEST_P(DevicePoolTest, LostDeviceIsUnavailable) {
  cuemu::BreakDevice();
  EXPECT_THAT(AllocateDevicePool(device_, {.bytes = kMiB}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("cudaErrorLaunchFailure")));
  cuemu::HealDevice();
}

class HostMemoryTest : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_EQ(cuemu::HostBytesRegistered(), 0U);
    cuemu::SetDevice({});
    cuemu::HealDevice();
  }

  std::vector<std::byte> memory_ = std::vector<std::byte>(kMiB);
};

TEST_F(HostMemoryTest, IsRegisteredUntilTheBufferIsGone) {
  {
    ASSERT_OK_AND_ASSIGN(const DeviceBuffer buffer, RegisterHostMemory(memory_));
    EXPECT_EQ(buffer.bytes().data(), memory_.data());
    EXPECT_EQ(cuemu::HostBytesRegistered(), kMiB);
    EXPECT_THAT(RegisterHostMemory(memory_),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("already")));
  }
  EXPECT_OK(RegisterHostMemory(memory_));
}

TEST_F(HostMemoryTest, WhatCannotBeLockedSaysWhatLimitsIt) {
  cuemu::SetDevice({.lockable_bytes = kMiB / 2});
  EXPECT_THAT(RegisterHostMemory(memory_),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("1 MiB"), HasSubstr("limit on locked memory"),
                             HasSubstr("host.budget"))));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(HostMemoryTest, NothingIsNotRegistered) {
  EXPECT_THAT(RegisterHostMemory({}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("0 bytes")));
}

}  // namespace
}  // namespace ebbtide::gpu
