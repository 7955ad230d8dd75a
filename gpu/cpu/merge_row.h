// SPDX-License-Identifier: Apache-2.0
//
// The arithmetic of joining two partial attentions of one row, shared by merge and by attend's own
// parts.

#pragma once

#include <span>

namespace ebbtide::gpu {

struct JoinedRow {
  double weight = 1;       // Of what is there.
  double part_weight = 0;  // Of the part that joins; 0 where it saw nothing.
  double lse = 0;
};

// From the log-sum-exps of both, either of which may be -inf.
JoinedRow JoinRow(double lse, double part_lse);

// output := weight * output + part_weight * part, in f64, rounded once: the same bits everywhere.
void MergeRow(const JoinedRow& joined, std::span<const float> part, std::span<float> output);

}  // namespace ebbtide::gpu
