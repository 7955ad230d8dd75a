// SPDX-License-Identifier: Apache-2.0
//
// Memory that results are carried through, on the device and pinned on the host, which frees
// itself. The device tier's own is gpu/cuda/device_pool.h.
// Tested by tests/unit/gpu/cuda_backend_test.cc.

#pragma once

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"

namespace ebbtide::gpu {

struct FreeDeviceMemory {
  void operator()(std::byte* memory) const;
};
struct FreePinnedMemory {
  void operator()(std::byte* memory) const;
};
using DeviceMemory = std::unique_ptr<std::byte, FreeDeviceMemory>;
using PinnedMemory = std::unique_ptr<std::byte, FreePinnedMemory>;

// Holding anything, aligned to 256 bytes.
//   kResourceExhausted  there is no such room; of pinned memory: HostMemoryFull
//   kUnavailable        the device failed
absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes);
absl::StatusOr<PinnedMemory> AllocatePinned(size_t bytes);

}  // namespace ebbtide::gpu
