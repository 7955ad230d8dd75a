// SPDX-License-Identifier: Apache-2.0
//
// Scores from keys alone: KeyDiff.
// Tested by tests/unit/gpu/geometry_test.cc.

#pragma once

#include <cstdint>
#include <span>

#include "gpu/extent.h"
#include "gpu/shape.h"

namespace ebbtide::gpu {

struct GeometryArgs {
  Dtype dtype = Dtype::kF16;
  int head_dim = 0;
  std::span<const Extent> extents;  // Slots with kNoToken are left out and get 0.
  std::span<float> score;           // [slots] out
};

// KeyDiff: how unlike a key is to the mean unit key; larger stays.
//
//   Math      score[s] = -cos(key[s], mean_j key[j] / |key[j]|); a zero key scores 0, and all do
//             where unit keys cancel: where their mean is shorter than 1e-6, its direction is noise
//   Numerics  CPU, CUDA: f32 products, f64 anchor; within 1e-5 of f64 for norms of 1e-18 to 1e18
//   Repeats   bit for bit, for one build and SIMD target or GPU; the anchor sums in order of index
//             blocks, so slots may lie in any order only if the same order is given again
//   Cost      reads each key twice
//   Source    KeyDiff arXiv:2504.15364
void KeyDiffReference(const GeometryArgs& args);
void KeyDiffCpu(const GeometryArgs& args);

// Stops the process where a size disagrees with the shape.
void CheckGeometry(const GeometryArgs& args);

inline constexpr double kAnchorMin = 1e-6;  // Mean unit keys shorter than this have no direction.

}  // namespace ebbtide::gpu
