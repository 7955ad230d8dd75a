// SPDX-License-Identifier: Apache-2.0
//
// Joins two partial attentions of the same rows over disjoint tokens.
// Tested by tests/unit/gpu/merge_test.cc.

#pragma once

#include <span>

namespace ebbtide::gpu {

struct MergeArgs {
  int rows = 0;
  int head_dim = 0;
  std::span<const float> part_output;  // [rows, head_dim]
  std::span<const float> part_lse;     // [rows]
  std::span<float> output;             // [rows, head_dim] in and out
  std::span<float> lse;                // [rows] in and out
};

//   Math      l = log(e^lse + e^part_lse);  o = e^(lse-l) * output + e^(part_lse-l) * part_output
//   Numerics  f32 in and out, weights in f64; (0, -inf) is neutral, two of them stay (0, -inf)
//   Repeats   bit for bit, on every backend but for exp and log in f64, which CUDA rounds its own
//   way Cost      reads and writes each row once Source    arXiv:2205.14135
void MergeReference(const MergeArgs& args);
void MergeCpu(const MergeArgs& args);

// Stops the process where a span disagrees with the shape.
void CheckMerge(const MergeArgs& args);

}  // namespace ebbtide::gpu
