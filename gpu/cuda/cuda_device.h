// SPDX-License-Identifier: Apache-2.0
//
// Which device there is, what it can do, and if none, why. Nothing here links the driver: where its
// library is missing, that is an answer.
// Tested by tests/unit/gpu/cuda_device_test.cc.

#pragma once

#include <cuda.h>

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebbtide::gpu {

// The driver's functions for memory that is reserved, made and mapped in separate steps.
struct VirtualMemory {
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) unreserve = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuGetErrorName) error_name = nullptr;

  bool exports_files = false;  // Memory can be handed to other processes as a file descriptor.
};

struct CudaDevice {
  std::string name;    // "NVIDIA H200"
  int capability = 0;  // 90: compute capability 9.0.
  size_t memory_bytes = 0;
  bool reads_host_addresses = false;  // Registered host memory has the same address there.
  std::optional<VirtualMemory> virtual_memory = std::nullopt;
};

// The least that this build's kernels were compiled for (CMAKE_CUDA_ARCHITECTURES).
#if defined(EBBTIDE_CUDA_CAPABILITY_MIN)
inline constexpr int kCudaCapabilityMin = EBBTIDE_CUDA_CAPABILITY_MIN;
#else
inline constexpr int kCudaCapabilityMin = 80;
#endif

// The first device that this process may see (CUDA_VISIBLE_DEVICES says which), made ready.
//   kFailedPrecondition  no driver, one that is too old, no device, or one that is too old
//   kUnavailable         the device does not answer
absl::StatusOr<CudaDevice> FindCudaDevice();

}  // namespace ebbtide::gpu
