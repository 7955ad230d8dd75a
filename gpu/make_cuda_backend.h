// SPDX-License-Identifier: Apache-2.0
//
// The CUDA backend, where this build has one: gpu/cuda where nvcc was found, else no_cuda.cc.
// Tested by tests/integration/daemon_test.cc.

#pragma once

#include <memory>

#include "absl/status/statusor.h"

#include "gpu/backend.h"

namespace ebbtide::gpu {

//   kUnimplemented       this build has none
//   kFailedPrecondition  no driver, no device, or one that is too old; the message says which
//   kUnavailable         the device does not answer
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend();

}  // namespace ebbtide::gpu
