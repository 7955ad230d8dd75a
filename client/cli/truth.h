// SPDX-License-Identifier: Apache-2.0
//
// Exact full attention of a trace in float64: what every answer is measured against. Knows nothing
// of the daemon. Contract: tests/unit/client/truth_test.cc compares it with the plain loops.

#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

#include "base/executor.h"
#include "client/cli/trace.h"

namespace ebbtide::cli {

struct LayerTruth {
  uint32_t query_heads = 0;
  uint32_t head_dim = 0;
  std::vector<double> output;  // [tokens, query_heads, head_dim]
  std::vector<double> lse;     // [tokens, query_heads] natural log
  // [tokens, query_heads] how far rounding in f32 may move a logit of this query over the keys it
  // may see, whatever the order of the sum: scale * |q| * max |k| * (head_dim + 4) * 2^-24.
  std::vector<double> logit_slack;

  std::span<const double> Output(uint64_t token, uint32_t head) const {
    return std::span(output).subspan((token * query_heads + head) * head_dim, head_dim);
  }
};

// Token t attends to 0 … t. Reports the tokens done, summed over kv heads, by `progress`, from one
// thread at a time. Asks `is_stopped`, from any thread, after every few milliseconds of work.
//
//   Math   o[t,h] = sum_j softmax_j(scale * q[t,h] . k[j, h/g]) v[j, h/g], j <= t
//   Cost   tokens^2 * query_heads * head_dim multiplications and additions
//   Errors kCancelled  it was stopped
absl::StatusOr<LayerTruth> ComputeTruth(
    const Trace& trace, const TraceLayer& layer, ParallelFor& parallel,
    const std::function<void(uint64_t)>& progress,
    const std::function<bool()>& is_stopped = [] { return false; });

}  // namespace ebbtide::cli
