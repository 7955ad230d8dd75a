// SPDX-License-Identifier: Apache-2.0
//
// How much the absent tokens of pages could add to an answer, from their digests alone.
// Tested by tests/unit/gpu/bound_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace ebbtide::gpu {

// One lane: every row of queries against every page that has absent tokens.
struct BoundArgs {
  int head_dim = 0;
  int rows = 0;  // group * queries
  int pages = 0;
  float scale = 0;
  std::span<const float> query;              // [rows, head_dim]
  std::span<const std::byte* const> digest;  // [pages] digest.h
  std::span<const int32_t> absent;           // [pages] absent tokens, 1 .. tokens of the page
  // [rows, pages] sum of scale * q . k over the page's resident tokens, found in f64 and rounded to
  // f32; what a page without resident tokens has here is not looked at. Empty: no page has any.
  std::span<const float> resident_logit_sum = {};
  // [rows] >= |z - exact z| of each logit in those sums (AttendLogitError). Empty: they are exact.
  std::span<const float> resident_logit_error = {};
  std::span<float> mass_low;       // [rows, pages] out: log mass of the absent, from below
  std::span<float> mass_high;      // [rows, pages] out: and from above
  std::span<float> mass_estimate;  // [rows, pages] out: ln|A| + mean logit, no promise
};

// Bounds of log sum_{absent j} exp(scale * q . k_j).
//
//   Math      a <= z_j <= b from the box, no further out than scale |q| key_norm_max
//             t = (|P| scale q . mean - resident_logit_sum) / |A|, the absent tokens' mean logit
//             low   ln|A| + max(a, t)  (Jensen)
//             high  ln|A| + ln(((b-t) e^a + (t-a) e^b) / (b-a))  (chord)
//             with t moved outward by what is open about it, over |A|: |P| times scale |q|
//             key_mean_error and the rounding of q . mean, |R| times the error of a resident logit,
//             and the rounding of their sum
//   Units     natural logarithm
//   Numerics  outward in every rounding: low is never above, high never below the exact value for
//             the keys the digest was made of; -inf and inf where a product overflows. CUDA: f64 as
//             the reference
//   Repeats   bit for bit, for one build and SIMD target or device
//   Cost      reads each digest's key rows once per tile of rows; 6 * rows * pages * head_dim flops
//   Source    docs/architecture.md, bounds
void BoundReference(const BoundArgs& args);
void BoundCpu(const BoundArgs& args);

// Stop the process where a size disagrees with the shape; `tokens` are those of page p.
void CheckBound(const BoundArgs& args);
void CheckAbsent(const BoundArgs& args, size_t p, int32_t tokens);

// distance[r, p] >= |v - output[r]| for every token of page p: |value_mean - output| + radius, or
// |output| + value_norm_max where that is less.
struct ValueDistanceArgs {
  int head_dim = 0;
  int rows = 0;
  int pages = 0;
  std::span<const float> output;             // [rows, head_dim]
  std::span<const std::byte* const> digest;  // [pages]
  std::span<float> distance;                 // [rows, pages] out, rounded up
};
void ValueDistanceReference(const ValueDistanceArgs& args);
void ValueDistanceCpu(const ValueDistanceArgs& args);

void CheckValueDistance(const ValueDistanceArgs& args);

}  // namespace ebbtide::gpu
