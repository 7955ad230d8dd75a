// SPDX-License-Identifier: Apache-2.0
//
// What threads of a block compute together, and numbers that lie at any address.

#pragma once

#include <cstddef>
#include <cstring>

#include "gpu/cuda/port.h"
#include "gpu/cuda/warp.cuh"

namespace ebbtide::gpu {

struct Larger64 {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

// `value` of every thread of a block of kThreads joined, in an order that depends on nothing; all
// get it. Waits for the block before and after.
template <int kThreads, class T, class Join>
__device__ T JoinBlock(T value, Join join) {
  __shared__ T across[kThreads / kWarpThreads];
  const int t = static_cast<int>(threadIdx.x);
  value = WarpJoin(value, join);
  __syncthreads();  // Whoever joined before has read his.
  if (t % kWarpThreads == 0) across[t / kWarpThreads] = value;
  __syncthreads();
  value = across[0];
#pragma unroll
  for (int w = 1; w < kThreads / kWarpThreads; ++w) value = join(value, across[w]);
  return value;
}

template <class T>
__device__ __forceinline__ T ReadAt(const std::byte* at) {
  T value;
  memcpy(static_cast<void*>(&value), at, sizeof(T));
  return value;
}
template <class T>
__device__ __forceinline__ void WriteAt(std::byte* at, T value) {
  memcpy(at, static_cast<const void*>(&value), sizeof(T));
}

// Element i of a row of f16.
__device__ __forceinline__ float HalfAt(const std::byte* row, int i) {
  return __half2float(ReadAt<__half>(row + 2 * static_cast<size_t>(i)));
}

// The least f32 >= x and the largest <= x.
__device__ __forceinline__ float RoundUp32(double x) {
  return __double2float_ru(x);
}
__device__ __forceinline__ float RoundDown32(double x) {
  return -__double2float_ru(-x);
}

}  // namespace ebbtide::gpu
