// SPDX-License-Identifier: Apache-2.0
//
// How a kernel file launches: with its lists carried over, and an error as a status.

#pragma once

#include "absl/status/status.h"

#include "base/status_macros.h"
#include "gpu/cuda/cuda_status.h"
#include "gpu/cuda/cuda_stream.h"
#include "gpu/cuda/port.h"

namespace ebbtide::gpu {

struct LaunchShape {
  const char* operation;  // For messages.
  dim3 grid;
  unsigned threads;
};

template <class... Parameters, class... Arguments>
absl::Status Launch(CudaStream& stream, const LaunchShape& shape, void (*kernel)(Parameters...),
                    const Arguments&... arguments) {
  EBBTIDE_RETURN_IF_ERROR(stream.CarryUploads());
  EBBTIDE_RETURN_IF_ERROR(
      CudaStatus(shape.operation,
                 Enqueue(kernel, shape.grid, dim3(shape.threads), stream.handle(), arguments...)));
  stream.ReuseScratch();
  return absl::OkStatus();
}

}  // namespace ebbtide::gpu
