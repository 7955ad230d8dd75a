// SPDX-License-Identifier: Apache-2.0
//
// How the values of a few attended tokens lie around their mean: what the certificate needs of a
// page in a low-bit form beside its output. Tested by tests/unit/gpu/spread_test.cc.

#pragma once

#include <span>

#include "gpu/shape.h"

namespace ebbtide::gpu {

// Of one row, by its tokens' shares p_t of what it attends to.
struct Spread {
  float each = 0;   // >= root of sum_t p_t |value_t - output|^2
  float focus = 1;  // >= sum_t p_t^2
  float focal = 0;  // >= root of sum_t p_t^2 |value_t - focal output|^2
};

struct SpreadArgs {
  int rows = 0;
  int tokens = 0;  // At most kPageTokensMax.
  int head_dim = 0;
  std::span<const float> value;   // [tokens, head_dim]
  std::span<const float> logits;  // [rows, tokens] -inf: not seen
  std::span<const float> lse;     // [rows] of them; -inf: nothing is seen
  std::span<const float> output;  // [rows, head_dim]
  std::span<float> focal_output;  // [rows, head_dim] out: the values' mean by squares of shares
  std::span<Spread> spread;       // [rows] out
};

//   Math      p_t = e^(logit_t - lse) over their sum; focal output = sum_t p_t^2 value_t / sum_t
//             p_t^2. Zeros where nothing is seen.
//   Numerics  rounded up: spreads and focus are at most 1.5e-4 above the exact ones for the outputs
//             as they are stored, and 1e-20; sums in f64 by the reference, in f32 on the CPU
//   Repeats   bit for bit, for one build and SIMD target
//   Cost      reads the values twice for each row, from the first-level cache; 10 * rows * tokens *
//             head_dim flops
//   Source    service/attention/certificate.cc
void SpreadReference(const SpreadArgs& args);
void SpreadCpu(const SpreadArgs& args);

// |focal output - exact| in l2 norm is at most so much of the largest |value|: where their squares
// count, shares are off by some 25 roundings, which means of values follow fourfold; a sum of 64
// tokens by as many as it has terms.
constexpr double kFocalOutputError = 0x1p-16;

// Stops the process where a span disagrees with the shape.
void CheckSpread(const SpreadArgs& args);

}  // namespace ebbtide::gpu
