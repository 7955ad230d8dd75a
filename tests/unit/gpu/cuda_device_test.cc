// SPDX-License-Identifier: Apache-2.0
//
// Why there is no device, said so that an operator knows what to do.

#include "gpu/cuda/cuda_device.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/cuemu/device.h"
#include "tests/cuemu/runtime.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::gpu {
namespace {

using test::StatusIs;
using testing::AllOf;
using testing::HasSubstr;

class CudaDeviceTest : public testing::Test {
 protected:
  void TearDown() override {
    cuemu::SetDevice({});
    cuemu::HealDevice();
  }

  // What is found where the device is `traits`.
  absl::StatusOr<CudaDevice> Find(const cuemu::DeviceTraits& traits) {
    cuemu::SetDevice(traits);
    return FindCudaDevice();
  }
};

TEST_F(CudaDeviceTest, SaysWhatItIs) {
  ASSERT_OK_AND_ASSIGN(const CudaDevice device,
                       Find({.name = "NVIDIA H200", .memory_bytes = size_t{141} << 30}));
  EXPECT_EQ(device.name, "NVIDIA H200");
  EXPECT_EQ(device.capability, 90);
  EXPECT_EQ(device.memory_bytes, size_t{141} << 30);
  EXPECT_TRUE(device.reads_host_addresses);
  ASSERT_TRUE(device.virtual_memory.has_value());
  EXPECT_TRUE(device.virtual_memory->exports_files);
}

TEST_F(CudaDeviceTest, NamesWhatTheDeviceLacks) {
  ASSERT_OK_AND_ASSIGN(const CudaDevice plain,
                       Find({.has_virtual_memory = false, .reads_host_addresses = false}));
  EXPECT_FALSE(plain.virtual_memory.has_value());
  EXPECT_FALSE(plain.reads_host_addresses);
  ASSERT_OK_AND_ASSIGN(const CudaDevice alone, Find({.exports_files = false}));
  ASSERT_TRUE(alone.virtual_memory.has_value());
  EXPECT_FALSE(alone.virtual_memory->exports_files);
}

TEST_F(CudaDeviceTest, WithoutADriverSaysSo) {
  EXPECT_THAT(Find({.driver_version = 0}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("no CUDA driver"), HasSubstr("libcuda.so.1"))));
}

TEST_F(CudaDeviceTest, OldDriverIsNamedWithWhatIsNeeded) {
  EXPECT_THAT(
      Find({.driver_version = 10020}),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("CUDA 10.2"), HasSubstr("this build needs"), HasSubstr("update"))));
}

TEST_F(CudaDeviceTest, WithoutADeviceSaysSo) {
  EXPECT_THAT(Find({.devices = 0}),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("CUDA_VISIBLE_DEVICES")));
}

TEST_F(CudaDeviceTest, OldDeviceIsNamedWithWhatIsNeeded) {
  EXPECT_THAT(Find({.name = "Tesla T4", .major = 7, .minor = 5}),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("Tesla T4"), HasSubstr("7.5"), HasSubstr("8.0"))));
}

TEST_F(CudaDeviceTest, LostDeviceIsUnavailable) {
  cuemu::BreakDevice();
  EXPECT_THAT(FindCudaDevice(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("cudaErrorLaunchFailure")));
}

}  // namespace
}  // namespace ebbtide::gpu
