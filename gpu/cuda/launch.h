// SPDX-License-Identifier: Apache-2.0
//
// How a kernel file launches: with its lists carried over, and an error as a status.

#pragma once

#include <cstddef>

#include "absl/status/status.h"

#include "base/status_macros.h"
#include "gpu/cuda/cuda_status.h"
#include "gpu/cuda/cuda_stream.h"
#include "gpu/cuda/port.h"

namespace ebbtide::gpu {

// Blocks of a lane that has `parts` parts, `block_parts` of them in a block. A grid has as many for
// each lane, in one dimension, which alone has room for any number: LaneOf and PartOf take it
// apart.
inline unsigned BlocksOf(size_t parts, size_t block_parts) {
  return static_cast<unsigned>((parts + block_parts - 1) / block_parts);
}
inline dim3 GridOf(size_t lanes, unsigned lane_blocks) {
  return dim3(static_cast<unsigned>(lanes) * lane_blocks);
}
__device__ __forceinline__ unsigned LaneOf(unsigned lane_blocks) {
  return blockIdx.x / lane_blocks;
}
__device__ __forceinline__ unsigned PartOf(unsigned lane_blocks) {
  return blockIdx.x % lane_blocks;
}

struct LaunchShape {
  const char* operation = "";  // For messages.
  dim3 grid;
  unsigned threads = 1;
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
