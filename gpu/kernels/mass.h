// SPDX-License-Identifier: Apache-2.0
//
// How much attention each slot draws, of rows whose logits are there: the base of h2o and tova. And
// snapkv's pooling, whose windows are window.h's.
// Tested by tests/unit/gpu/mass_test.cc.

#pragma once

#include <cstdint>
#include <span>

namespace ebbtide::gpu {

struct MassArgs {
  int group = 1;
  int queries = 1;
  int slots = 0;
  std::span<const float> logits;  // [group, queries, slots], -inf where masked
  std::span<const float> lse;     // [group, queries]; rows with -inf add nothing
  std::span<double> mass;         // [slots] added to
};

// Adds to mass[s] the attention of every query, averaged over the group.
//
//   Math      mass[s] += mean_g sum_m exp(logits[g,m,s] - lse[g,m])
//   Numerics  exponentials in f32 (CPU, CUDA) or f64 (reference); sums in f64, for an f32 sum that
//             has reached 1e3 no longer feels 1e-5
//   Repeats   bit for bit, for one build and SIMD target or GPU
//   Cost      reads each logit once
//   Source    H2O arXiv:2306.14048 (all queries), TOVA arXiv:2401.06104 (last row)
void MassReference(const MassArgs& args);
void MassCpu(const MassArgs& args);

// Stops the process where a span disagrees with the shape.
void CheckMass(const MassArgs& args);

struct PoolArgs {
  int kernel = 7;               // Odd width.
  std::span<const float> mass;  // [tokens] in index order
  std::span<float> pooled;      // [tokens] out
};

// Stops the process where the width is even or the spans differ.
void CheckPool(const PoolArgs& args);

// Largest mass within kernel / 2 tokens on either side (SnapKV's max pooling; the ends see fewer).
void MaxPool(const PoolArgs& args);
// Sum over the same window divided by `kernel`, zeros past the ends (SnapKV's average pooling).
void AveragePool(const PoolArgs& args);

}  // namespace ebbtide::gpu
