// SPDX-License-Identifier: Apache-2.0
//
// Rounding to the side asked for: what a bound needs when it is stored narrower than it was found.
// Tested by tests/unit/gpu/outward_test.cc.

#pragma once

#include <cstdint>

namespace ebbtide::gpu {

inline constexpr uint16_t kHalfMax = 0x7BFF;  // 65504
inline constexpr uint16_t kHalfInfinity = 0x7C00;

// The largest f16 <= `value` and the smallest >= `value`, which is not NaN. Beyond 65504 the
// outward one is an infinity, the inward one 65504.
uint16_t HalfDown(double value);
uint16_t HalfUp(double value);

// The nearest finite f16, ties to even: stays at 65504 beyond.
uint16_t HalfNearest(double value);

// The largest f32 <= `value` and the smallest >= `value`. NaN stays NaN.
float FloatDown(double value);
float FloatUp(double value);

}  // namespace ebbtide::gpu
