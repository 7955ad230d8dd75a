// SPDX-License-Identifier: Apache-2.0
//
// The operations of gpu/kernels on CUDA: what the contracts there say, for all lanes in one launch.
// Lists of addresses in the args (extents, key_slot, …) are read before return; arrays they name
// are read and written by the device, in stream order, and lie in memory that it reaches. Results
// are there after Wait.
//
//   kResourceExhausted  no device memory for lists or scratch; nothing was launched
//   kUnavailable        the device failed
//
// A broken contract that the host can see stops the process, one that only the device sees stops
// the device: Wait then answers kUnavailable. Tested with the contracts' own tests, on tests/cuemu.

#pragma once

#include <span>

#include "absl/status/status.h"

#include "gpu/kernels/attend.h"

namespace ebbtide::gpu {

class CudaStream;

absl::Status AttendCuda(std::span<const AttendArgs> lanes, CudaStream& stream);

}  // namespace ebbtide::gpu
