// SPDX-License-Identifier: Apache-2.0
//
// The boxes that codes are quantised in, and the steps from codes back to numbers: what decoding,
// its errors and encoding share. Rounds as the reference (gpu/kernels/codes_reference.cc).

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "gpu/cuda/block.cuh"
#include "gpu/cuda/port.h"
#include "gpu/kernels/codes.h"

namespace ebbtide::gpu {

inline constexpr int kCoarseSteps = CodeSteps(CodeForm::k4Bit);
inline constexpr int kFineSteps = CodeSteps(CodeForm::k8Bit);

// One channel of a box; `low` and `high` are f16.
struct CodeChannel {
  float low;
  float high;

  __device__ __forceinline__ bool is_finite() const {
    return std::isfinite(low) && std::isfinite(high);
  }
  __device__ __forceinline__ float width() const { return is_finite() ? high - low : 0.0F; }
};

// Of the box a digest or a coarse part opens with, at any address.
__device__ __forceinline__ CodeChannel ChannelAt(const std::byte* box, int head_dim, int d) {
  return {HalfAt(box, d), HalfAt(box, head_dim + d)};
}

__device__ __forceinline__ uint32_t NibbleAt(const std::byte* nibbles, size_t i) {
  return static_cast<uint32_t>(nibbles[i / 2]) >> (i % 2 * 4) & 15U;
}

// What a number of steps stands for.
__device__ __forceinline__ float StepsToFloat(const CodeChannel& channel, int form_steps,
                                              uint32_t steps) {
  if (!channel.is_finite()) return 0;
  const float step = channel.width() / static_cast<float>(form_steps);
  return static_cast<float>(steps) * step + channel.low;
}

__device__ __forceinline__ uint32_t FineSteps(uint32_t code) {
  return max(code, 8U) - 8;
}

}  // namespace ebbtide::gpu
