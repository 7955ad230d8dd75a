// SPDX-License-Identifier: Apache-2.0
//
// The one place where an error of CUDA becomes a status.
// Tested by tests/unit/gpu/cuda_stream_test.cc.

#pragma once

#include <cuda_runtime_api.h>

#include <string_view>

#include "absl/status/status.h"

namespace ebbtide::gpu {

// `what` says what was asked for: "attend", "device memory of 2 MiB".
//   kResourceExhausted  the device has no such room
//   kUnavailable        anything else: the device failed, and nothing of it may be trusted any more
absl::Status CudaStatus(std::string_view what, cudaError_t error);

}  // namespace ebbtide::gpu
