// SPDX-License-Identifier: Apache-2.0
//
// New keys and values into slots, with what later steps want from the same pass: norms.
// Tested by tests/unit/gpu/append_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gpu/shape.h"

namespace ebbtide::gpu {

// One lane. `key` and `value` are rows of a worker's tensor, `stride` bytes apart.
struct AppendArgs {
  Dtype dtype = Dtype::kF16;
  int head_dim = 0;
  int tokens = 0;
  const std::byte* key = nullptr;    // [tokens] rows of head_dim, any alignment
  const std::byte* value = nullptr;  // [tokens] rows of head_dim, any alignment
  size_t stride = 0;
  std::span<std::byte* const> key_slot;    // [tokens] where each key goes
  std::span<std::byte* const> value_slot;  // [tokens] where each value goes
  std::span<float> key_norm;               // [tokens] out: |key|, rounded up
  std::span<float> value_norm;             // [tokens] out: |value|, rounded up
};

//   Math      bytes are copied unchanged; norms are l2, at most 1e-6 relative above the exact value
//             and never below
//   Cost      reads and writes each byte once
void AppendReference(const AppendArgs& args);
void AppendCpu(const AppendArgs& args);

// Stops the process where a span disagrees with the shape.
void CheckAppend(const AppendArgs& args);

// A product of a key and a query stays finite in f32 for elements up to here: 256 channels of 2^96
// under a scale of at most 2^20 (service/model/geometry.h) are 2^124.
inline constexpr float kMagnitudeMax = 0x1p48F;

// Where the first element that is NaN, or beyond kMagnitudeMax either way, stands in `elements`, or
// -1.
ptrdiff_t FindTooLarge(Dtype dtype, std::span<const std::byte> elements);

}  // namespace ebbtide::gpu
