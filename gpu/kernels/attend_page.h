// SPDX-License-Identifier: Apache-2.0
//
// Attention over one decoded page, with what the certificate asks about it: how far its values
// spread around its output, and how evenly its weights do. Tested by
// tests/unit/gpu/attend_page_test.cc.

#pragma once

#include <cstdint>
#include <span>

#include "gpu/shape.h"

namespace ebbtide::gpu {

// Of one row: p_t are its shares, which add up to 1.
struct Spread {
  float each = 0;   // >= root of sum_t p_t |value_t - output|^2
  float focus = 1;  // >= sum_t p_t^2
  float focal = 0;  // >= root of sum_t p_t^2 |value_t - focal output|^2
};

struct AttendPageArgs {
  int rows = 0;
  int tokens = 0;  // At most kPageTokensMax.
  int head_dim = 0;
  float scale = 0;
  std::span<const float> query;       // [rows, head_dim]
  std::span<const float> page;        // [K tokens x d][V tokens x d]
  std::span<const uint64_t> visible;  // [rows] bit t: the row sees token t
  std::span<float> output;            // [rows, head_dim] out
  std::span<float> lse;               // [rows] out
  std::span<float> focal_output;      // [rows, head_dim] out: the values' mean by squares of shares
  std::span<Spread> spread;           // [rows] out
  std::span<float> logits = {};       // [rows, tokens] out where wanted; -inf: not seen
};

//   Math      logit_t = scale * query . key_t; p_t = e^(logit_t - lse); output = sum_t p_t value_t;
//             focal output = sum_t p_t^2 value_t / sum_t p_t^2. Zeros, and lse -inf, where nothing
//             is seen.
//   Numerics  logits, lse and output as attend's (AttendLogitError, AttendSumError of `tokens`).
//             Spreads and focus are rounded up: at most 1.5e-4 above the exact ones for logits and
//             outputs as they are stored, and 1e-20; sums in f64 by the reference, in f32 on the
//             CPU and CUDA, where shares and their squares below f32's normal range may cost a
//             spread 1e-18 of the largest |value|: the output's own error is 1e-7 of it
//   Repeats   bit for bit, for one build and SIMD target or GPU
//   Cost      reads keys once and values twice for each four rows, from the first-level cache; 12 *
//             rows * tokens * head_dim flops
//   Source    service/attention/certificate.cc
void AttendPageReference(const AttendPageArgs& args);
void AttendPageCpu(const AttendPageArgs& args);

// |focal output - exact| in l2 norm is at most so much of the largest |value|: where their squares
// count, shares are off by some 25 roundings, which means of values follow fourfold; a sum of 64
// tokens by as many as it has terms.
constexpr double kFocalOutputError = 0x1p-16;

// Stops the process where a span disagrees with the shape.
void CheckAttendPage(const AttendPageArgs& args);

}  // namespace ebbtide::gpu
