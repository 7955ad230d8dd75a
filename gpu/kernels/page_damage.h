// SPDX-License-Identifier: Apache-2.0
//
// The output error that losing a whole page would cause, from what attend answers for each extent
// alone: no key or value is read.
// Tested by tests/unit/gpu/page_damage_test.cc.

#pragma once

#include <span>

namespace ebbtide::gpu {

// One lane, its rows' attention and that of each of its pages (attend.h: part_output, part_lse).
struct PageDamageArgs {
  int head_dim = 0;
  int rows = 1;
  int pages = 0;
  std::span<const float> part_output;  // [pages, rows, head_dim]
  std::span<const float> part_lse;     // [pages, rows] -inf where a row sees nothing of a page
  std::span<const float> output;       // [rows, head_dim] over these pages and the rest below
  std::span<const float> lse;          // [rows]
  // What the rows attended to beside the pages, as one partial attention (merge.h). Empty: nothing.
  std::span<const float> rest_output = {};  // [rows, head_dim]
  std::span<const float> rest_lse = {};     // [rows]
  std::span<float> damage;                  // [pages] out
};

// Page CAOTE: error of each row's output if page p were gone, root of the sum of squares over rows.
//
//   Math      e = exp(part_lse[p,r] - lse[r])
//             damage[p] = sqrt(sum_r (e/(1-e) * |output[r] - part_output[p,r]|)^2)
//             where e > 1/2 the leave-one-out form e * |o_without_p - part_output[p,r]| is used,
//             from the other pages and the rest alone: no cancellation however near e is to 1.
//             Without any others o_without_p is 0, as attention over nothing is. Two pages of one
//             part_lse have half each at most, whatever rounding says: the usual form serves both.
//   Numerics  e in f32 or f64, distances and sums in f64; CPU and CUDA within
//             1e-5 * damage + 1e-6 * e * |o - part| + 1e-30 of the reference; always finite; rows
//             whose lse is -inf, and pages that a row sees nothing of, add nothing
//   Repeats   bit for bit, for one build and SIMD target or GPU; pages whose parts are equal have
//             equal damage
//   Cost      reads each part once, parts of rows with an e > 1/2 once more; 3 * pages * rows *
//             head_dim flops, 5 for those rows
//   Source    CAOTE arXiv:2504.14051 over pages: removing a set whose mass is e moves the output by
//             e/(1-e) times its distance from what the set attends to by itself
void PageDamageReference(const PageDamageArgs& args);
void PageDamageCpu(const PageDamageArgs& args);

// Stops the process where a span disagrees with the shape.
void CheckPageDamage(const PageDamageArgs& args);

}  // namespace ebbtide::gpu
