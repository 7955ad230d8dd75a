// SPDX-License-Identifier: Apache-2.0
//
// Holds one answer against the truth: how wrong it is, and whether its certificate said so. Knows
// nothing of calls. Contract: tests/unit/client/judge_test.cc.

#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/cli/truth.h"
#include "ebbtide/types.h"

namespace ebbtide::cli {

// One query token of one layer.
struct TokenVerdict {
  double rel_error = 0;             // sqrt(sum_h |o - o_full|^2) / sqrt(sum_h |o_full|^2)
  double certified_rel_error = 0;   // The same with the certified bounds for |o - o_full|.
  double worst_head_rel_error = 0;  // max_h |o - o_full| / |o_full|
  // Heads whose true error is above the certified bound, without tolerance; and heads whose lse
  // proves that more mass was left out than certified, rounding of f32 granted to the lse; the
  // latter only where no page was attended in a low-bit form.
  uint32_t error_violations = 0;
  uint32_t mass_violations = 0;
  std::vector<double> bound_over_error = {};  // Of the heads with an error.
};

// Verdicts on `result`, whose queries begin at token `first`; output in f32.
//   kInternal  the answer's arrays don't have the sizes that its `count` queries need
absl::StatusOr<std::vector<TokenVerdict>> Judge(const LayerTruth& truth, uint64_t first,
                                                uint64_t count, const client::AttendResult& result);

// What is reported of many numbers.
struct Summary {
  double mean = 0;
  double p50 = 0;
  double p99 = 0;
  double max = 0;
  uint64_t count = 0;  // Of the numbers; 0: the others say nothing.
};

// p50 and p99 by nearest rank: numbers that occurred.
Summary Summarise(std::vector<double> numbers);

}  // namespace ebbtide::cli
