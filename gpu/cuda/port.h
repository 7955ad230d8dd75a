// SPDX-License-Identifier: Apache-2.0
//
// The one header of CUDA that a kernel file includes: CUDA's own under nvcc, elsewhere the emulator
// that tests run kernels on (tests/cuemu). Only here do the two differ.

#pragma once

#include <utility>

#if defined(__CUDACC__)

#include <cuda_fp16.h>
#include <cuda_runtime.h>

// A contract of a kernel: where it is broken the device stops, and whoever waits for it learns so.
#define EBBTIDE_DEVICE_CHECK(condition, message) \
  do {                                           \
    if (!(condition)) __trap();                  \
  } while (false)

namespace ebbtide::gpu {

template <class... Parameters, class... Arguments>
cudaError_t Enqueue(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                    const Arguments&... arguments) {
  kernel<<<grid, block, 0, stream>>>(static_cast<Parameters>(arguments)...);
  return cudaGetLastError();
}

}  // namespace ebbtide::gpu

#else

#include <cuemu.h>

#define EBBTIDE_DEVICE_CHECK(condition, message)                      \
  do {                                                                \
    if (!(condition)) ::cuemu::Fail(message, ::cuemu::Place::Here()); \
  } while (false)

namespace ebbtide::gpu {

template <class... Parameters, class... Arguments>
cudaError_t Enqueue(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                    const Arguments&... arguments) {
  return ::cuemu::Enqueue(stream, [=] {
    ::cuemu::RunGrid(grid, block, [&] { kernel(static_cast<Parameters>(arguments)...); });
  });
}

}  // namespace ebbtide::gpu

#endif
