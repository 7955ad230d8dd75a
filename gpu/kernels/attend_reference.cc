// SPDX-License-Identifier: Apache-2.0
//
// Attention as its formula has it: all logits of a row, their softmax, the weighted sum; in
// float64.

#include <cmath>
#include <vector>

#include "gpu/element.h"
#include "gpu/kernels/attend.h"
#include "gpu/kernels/logits_reference.h"

namespace ebbtide::gpu {
namespace {

void AttendRow(const AttendArgs& args, size_t row, std::vector<double>& logits) {
  const size_t row_bytes = RowBytes(args.dtype, args.head_dim);
  const double largest = ReferenceLogits(args, row, logits);
  std::vector<double> output(static_cast<size_t>(args.head_dim), 0.0);
  double sum = 0;
  size_t s = 0;
  for (const Extent& extent : args.extents) {
    for (int slot = 0; slot < extent.slots; ++slot, ++s) {
      if (logits[s] == kHiddenLogit) continue;
      const double weight = std::exp(logits[s] - largest);
      const std::byte* value = extent.value + static_cast<size_t>(slot) * row_bytes;
      sum += weight;
      for (int d = 0; d < args.head_dim; ++d) {
        output[static_cast<size_t>(d)] += weight * ElementAt(args.dtype, value, d);
      }
    }
  }
  const bool sees_nothing = sum == 0;
  for (size_t d = 0; d < output.size(); ++d) {
    args.output[row * output.size() + d] =
        sees_nothing ? 0.0F : static_cast<float>(output[d] / sum);
  }
  args.lse[row] = static_cast<float>(sees_nothing ? kHiddenLogit : largest + std::log(sum));
}

}  // namespace

void AttendReference(const AttendArgs& args) {
  CheckAttend(args);
  std::vector<double> logits(AttendSlots(args));
  for (size_t row = 0; row < args.lse.size(); ++row) {
    AttendRow(args, row, logits);
    if (args.logits.empty()) continue;
    for (size_t s = 0; s < logits.size(); ++s) {
      args.logits[row * logits.size() + s] = static_cast<float>(logits[s]);
    }
  }
}

}  // namespace ebbtide::gpu
