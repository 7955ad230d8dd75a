// SPDX-License-Identifier: Apache-2.0
//
// What threads of a warp compute together, and the exponential that kernels share.

#pragma once

#include "gpu/cuda/port.h"

namespace ebbtide::gpu {

inline constexpr int kWarpThreads = 32;
inline constexpr unsigned kWholeWarp = 0xFFFFFFFFU;

// The value of every thread joined by `join`, which must not mind the order; all get the same bits.
template <class T, class Join>
__device__ __forceinline__ T WarpJoin(T value, Join join) {
#pragma unroll
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    value = join(value, __shfl_xor_sync(kWholeWarp, value, distance));
  }
  return value;
}

struct Plus {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

struct Lesser {
  __device__ __forceinline__ int operator()(int a, int b) const { return min(a, b); }
};

// Sums each of values[0 .. kCount) over the kWidth neighbouring threads that share a row, halving
// them at each exchange: kCount + log2(kWidth) shuffles where one by one would take kCount times
// log2(kWidth). Afterwards thread `part` of the kWidth holds the sums from part * kCount / kWidth
// on (kCount >= kWidth), or the one of part / (kWidth / kCount). Each is added up in the same
// order, whatever kCount.
template <int kCount, int kWidth>
__device__ __forceinline__ void TransposeSum(float (&values)[kCount], int part) {
  if constexpr (kWidth > 1) {
    constexpr int kNext = kWidth / 2;
    if constexpr (kCount > 1) {
      float half[kCount / 2];
      const bool is_upper = (part & kNext) != 0;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const float sent = is_upper ? values[i] : values[i + kCount / 2];
        const float kept = is_upper ? values[i + kCount / 2] : values[i];
        half[i] = kept + __shfl_xor_sync(kWholeWarp, sent, kNext);
      }
      TransposeSum<kCount / 2, kNext>(half, part);
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) values[i] = half[i];
    } else {
      values[0] += __shfl_xor_sync(kWholeWarp, values[0], kNext);
      TransposeSum<1, kNext>(values, part);
    }
  }
}

// e^x within 2 units in the last place (CUDA's programming guide; 1 in recent ones); 0 below -87.3,
// where results would be subnormal, as on the CPU.
__device__ __forceinline__ float Exp(float x) {
  return x < -87.3F ? 0.0F : expf(x);
}

}  // namespace ebbtide::gpu
