// SPDX-License-Identifier: Apache-2.0
//
// The device tier's memory: one range of addresses, backed by chunks that can be handed to other
// processes one by one where the device supports that, else one plain allocation.
// Tested by tests/unit/gpu/device_pool_test.cc.

#pragma once

#include <cstddef>

#include "absl/status/statusor.h"

#include "gpu/cuda/cuda_device.h"
#include "gpu/device_buffer.h"

namespace ebbtide::gpu {

struct DevicePoolOptions {
  size_t bytes = 0;
  size_t chunk_bytes = size_t{1} << 30;
};

// Zeroed, aligned to 2 MiB, and all of it there: a pool that grew later could find the device full
// of others' memory while a sequence runs. What uses it must be done before it is released.
//   kResourceExhausted  the device has no such room; nothing is left behind
//   kUnavailable        the device failed
absl::StatusOr<DeviceBuffer> AllocateDevicePool(const CudaDevice& device,
                                                const DevicePoolOptions& options);

}  // namespace ebbtide::gpu
