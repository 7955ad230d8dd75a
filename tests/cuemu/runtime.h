// SPDX-License-Identifier: Apache-2.0
//
// What stands in for the CUDA runtime (runtime.cc): the functions that gpu/cuda calls, over this
// machine's memory. Work on a stream runs only once somebody waits for it, as late as CUDA allows,
// so that a wait or an event that is missing shows. Fresh memory holds 0xFF: NaNs. A stream that is
// captured becomes a graph, unless somebody waits or allocates meanwhile.
// Tested by tests/cuemu/cuemu_test.cc.

#pragma once

#include <cuda_runtime.h>

#include <functional>

namespace cuemu {

// Puts `work` at the end of a stream; cudaErrorInvalidResourceHandle for the default stream, which
// hides what waits for what.
cudaError_t Enqueue(cudaStream_t stream, std::function<void()> work);

// From now on nothing works and every wait says so, as after a fault in a kernel. Until Heal.
void BreakDevice();
void HealDevice();
// What a call answers that ends with `error`: a device that broke has its own answer. The last one
// that is no success is remembered, as the runtime does.
cudaError_t Answer(cudaError_t error);

}  // namespace cuemu
