// SPDX-License-Identifier: Apache-2.0
//
// A norm that bounds are built on: never below the exact one.

#pragma once

#include <cmath>

#include "gpu/outward.h"

namespace ebbtide::gpu {

// From a sum of at most 256 squares of f32, f16 or bf16 in f64: squares are exact there, the sum is
// off by less than 1e-13, which the margin covers before the root is rounded up.
inline float NormFromSquares(double sum) {
  return FloatUp(std::sqrt(sum) * (1 + 1e-13));
}

}  // namespace ebbtide::gpu
