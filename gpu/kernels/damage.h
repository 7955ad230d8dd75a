// SPDX-License-Identifier: Apache-2.0
//
// The output error that losing one token would cause: CAOTE and FastCAOTE.
// Tested by tests/unit/gpu/damage_test.cc.

#pragma once

#include <cstdint>
#include <span>

#include "gpu/extent.h"
#include "gpu/shape.h"

namespace ebbtide::gpu {

// One lane, several weight rows (true attention rows, or one normalised base score).
struct DamageArgs {
  Dtype dtype = Dtype::kF16;
  int head_dim = 0;
  int rows = 1;
  std::span<const Extent> extents;  // Slots with kNoToken get 0.
  // [rows, slots] with lse below: weights are exp(logits - lse). -inf where a slot holds nothing.
  std::span<const float> logits;
  std::span<const float> lse;     // [rows] over these extents and the rest below
  std::span<const float> centre;  // [rows, head_dim] the output of each row (CAOTE), or the mean
                                  // value repeated (FastCAOTE)
  // What the rows attended to beside the extents, as one partial attention (merge.h): tokens
  // recalled in place, or a learned sink (output 0). Empty: nothing. FastCAOTE has no use for it.
  std::span<const float> rest_output = {};  // [rows, head_dim]
  std::span<const float> rest_lse = {};     // [rows]
  std::span<float> damage;                  // [slots] out
};

// CAOTE: error of each row's output if slot s were gone, root of the sum of squares over rows.
//
//   Math      a = exp(logits[r,s] - lse[r])
//             damage[s] = sqrt(sum_r (a/(1-a) * |centre[r] - value[s]|)^2)
//             where a > 1/2 the leave-one-out form a * |o_without_s - value[s]| is used, from the
//             logits and values of all others (rest included): no cancellation however near a is to
//             1. Without any others o_without_s is 0, as attention over nothing is. Two slots of
//             one logit have half each at most, whatever rounding says: equal ones have equal
//             damage.
//   Numerics  f32, where a > 1/2 f64; CPU and CUDA within
//             1e-5 * damage + 1e-6 * a * |o - v| + 1e-30 of the reference; always finite; rows
//             whose lse is -inf add nothing
//   Repeats   bit for bit, for one build and SIMD target or GPU
//   Cost      reads each value once; 3 * rows * slots * head_dim flops, 5 for rows with an a > 1/2
//   Source    CAOTE arXiv:2504.14051; sum over rows: identity 7 of docs/policies.md
void DamageReference(const DamageArgs& args);
void DamageCpu(const DamageArgs& args);

// Stops the process where a size disagrees with the shape.
void CheckDamage(const DamageArgs& args);

// FastCAOTE: the same with `centre` taken as given and no leave-one-out form, as its formula has
// it: damage[s] = sqrt(sum_r (a/(1-a) * |centre[r] - value[s]|)^2). 1 - a is taken as 2^-24 where
// it is less: lse is no better known, and the damage stays finite.
void FastDamageReference(const DamageArgs& args);
void FastDamageCpu(const DamageArgs& args);

// output[r] = sum_s weight[r,s] * value[s]: the "output" of a normalised base score, CAOTE's
// centre.
//   Numerics  f32 within a tile of slots, f64 across tiles (CUDA: f64)
//   Repeats   bit for bit, for one build and SIMD target or GPU
//   Cost      reads each value once per four rows
struct WeightedValueArgs {
  Dtype dtype = Dtype::kF16;
  int head_dim = 0;
  int rows = 1;
  std::span<const Extent> extents;
  std::span<const float> weight;  // [rows, slots]; 0 where the slot holds nothing
  std::span<float> output;        // [rows, head_dim] out
};
void WeightedValueReference(const WeightedValueArgs& args);
void WeightedValueCpu(const WeightedValueArgs& args);

void CheckWeightedValue(const WeightedValueArgs& args);

}  // namespace ebbtide::gpu
