// SPDX-License-Identifier: Apache-2.0
//
// Memory of this machine that a device reads and writes where it lies, over the bus: the host
// tier's, so that a page is recalled without being copied first.
// Tested by tests/unit/gpu/device_pool_test.cc.

#pragma once

#include <cstddef>
#include <span>

#include "absl/status/statusor.h"

#include "gpu/device_buffer.h"

namespace ebbtide::gpu {

// `memory`, whose pages stay locked until the buffer is gone; it must not be freed before.
//   kInvalidArgument    nothing, or something that is registered already
//   kResourceExhausted  HostMemoryFull: the pages can't be locked, and why
//   kUnimplemented      this system registers no host memory
//   kUnavailable        the device failed
absl::StatusOr<DeviceBuffer> RegisterHostMemory(std::span<std::byte> memory);

}  // namespace ebbtide::gpu
