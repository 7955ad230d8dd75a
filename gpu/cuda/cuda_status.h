// SPDX-License-Identifier: Apache-2.0
//
// The one place where an error of CUDA becomes a status.
// Tested by tests/unit/gpu/cuda_status_test.cc.

#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "absl/status/status.h"

namespace ebbtide::gpu {

// `what` says what was asked for: "attend", "device memory of 2 MiB".
// The runtime remembers the error no longer, which it would answer to the next launch.
//   kResourceExhausted  the device has no such room
//   kInternal           the build and the device do not go together: it has no kernels for the
//                       device, or asks for what the device does not do; nothing was run
//   kUnavailable        anything else: the device failed, and nothing of it may be trusted any more
absl::Status CudaStatus(std::string_view what, cudaError_t error);

}  // namespace ebbtide::gpu
