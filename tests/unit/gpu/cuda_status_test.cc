// SPDX-License-Identifier: Apache-2.0
//
// What each error of CUDA means to who asked: whether the device is full, wants another build, or
// is lost.

#include "gpu/cuda/cuda_status.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/cuda/cuda_memory.h"
#include "gpu/host_memory_full.h"
#include "tests/cuemu/device.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::gpu {
namespace {

using absl::StatusCode;
using test::StatusIs;
using testing::AllOf;
using testing::HasSubstr;

constexpr char kFull[] = "lower the device budget";
constexpr char kNoKernels[] = "no kernels for the device: build it with";
constexpr char kOurs[] = "please report it";
constexpr char kLost[] = "restart the daemon";

struct Meaning {
  cudaError_t error;
  StatusCode code;
  const char* advice;
};

TEST(CudaStatusTest, EachErrorSaysWhatToDoNext) {
  const std::vector<Meaning> table = {
      {cudaErrorMemoryAllocation, StatusCode::kResourceExhausted, kFull},
      {cudaErrorInvalidDeviceFunction, StatusCode::kInternal, kNoKernels},
      {cudaErrorInvalidKernelImage, StatusCode::kInternal, kNoKernels},
      {cudaErrorInvalidPtx, StatusCode::kInternal, kNoKernels},
      {cudaErrorInvalidSource, StatusCode::kInternal, kNoKernels},
      {cudaErrorJitCompilationDisabled, StatusCode::kInternal, kNoKernels},
      {cudaErrorJitCompilerNotFound, StatusCode::kInternal, kNoKernels},
      {cudaErrorNoKernelImageForDevice, StatusCode::kInternal, kNoKernels},
      {cudaErrorUnsupportedPtxVersion, StatusCode::kInternal, kNoKernels},
      {cudaErrorInvalidConfiguration, StatusCode::kInternal, kOurs},
      {cudaErrorInvalidSymbol, StatusCode::kInternal, kOurs},
      {cudaErrorInvalidValue, StatusCode::kInternal, kOurs},
      {cudaErrorLaunchOutOfResources, StatusCode::kInternal, kOurs},
      {cudaErrorNotSupported, StatusCode::kInternal, kOurs},
      {cudaErrorIllegalAddress, StatusCode::kUnavailable, kLost},
      {cudaErrorIllegalInstruction, StatusCode::kUnavailable, kLost},
      {cudaErrorMisalignedAddress, StatusCode::kUnavailable, kLost},
      {cudaErrorLaunchFailure, StatusCode::kUnavailable, kLost},
      {cudaErrorLaunchTimeout, StatusCode::kUnavailable, kLost},
      {cudaErrorAssert, StatusCode::kUnavailable, kLost},
      {cudaErrorECCUncorrectable, StatusCode::kUnavailable, kLost},
      {cudaErrorDevicesUnavailable, StatusCode::kUnavailable, kLost},
      {cudaErrorUnknown, StatusCode::kUnavailable, kLost},
  };
  for (const Meaning& meaning : table) {
    EXPECT_THAT(
        CudaStatus("attend", meaning.error),
        StatusIs(meaning.code, AllOf(HasSubstr("attend: cudaError"), HasSubstr(meaning.advice))))
        << "error " << static_cast<int>(meaning.error);
  }
  EXPECT_OK(CudaStatus("attend", cudaSuccess));
}

TEST(CudaStatusTest, AnErrorIsToldOnceAndNotToTheNextLaunch) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, size_t{1} << 50);
  ASSERT_EQ(error, cudaErrorMemoryAllocation);

  EXPECT_THAT(CudaStatus("memory", error), StatusIs(StatusCode::kResourceExhausted, HasSubstr("")));

  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// The device's own room has a budget of its own: what to do about the one does not help the other.
TEST(CudaStatusTest, MemoryOfThisMachineIsToldApartFromTheDevices) {
  cuemu::SetDevice({.memory_bytes = 1 << 20, .lockable_bytes = 1 << 20});
  const absl::Status device = AllocateDevice(2 << 20).status();
  const absl::Status host = AllocatePinned(2 << 20).status();
  EXPECT_OK(AllocatePinned(1 << 20));
  EXPECT_OK(AllocatePinned(1 << 20)) << "what was freed is taken still";
  cuemu::SetDevice({});

  EXPECT_THAT(device, StatusIs(StatusCode::kResourceExhausted, HasSubstr(kFull)));
  EXPECT_FALSE(IsHostMemoryFull(device));
  EXPECT_THAT(host, StatusIs(StatusCode::kResourceExhausted,
                             AllOf(HasSubstr("2 MiB"), HasSubstr("container's memory limit"))));
  EXPECT_TRUE(IsHostMemoryFull(host));
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
}  // namespace ebbtide::gpu
