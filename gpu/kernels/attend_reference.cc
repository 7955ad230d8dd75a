// SPDX-License-Identifier: Apache-2.0
//
// Attention as its formula has it: all logits of a row, their softmax, the weighted sum; in
// float64.

#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "gpu/element.h"
#include "gpu/kernels/attend.h"
#include "gpu/kernels/logits_reference.h"

namespace ebbtide::gpu {
namespace {

// Attention of a row over `extents`, whose logits are these.
void AttendExtents(const AttendArgs& args, std::span<const Extent> extents,
                   std::span<const double> logits, std::span<float> output, float& lse) {
  const size_t row_bytes = RowBytes(args.dtype, args.head_dim);
  double largest = kHiddenLogit;
  for (const double logit : logits) largest = std::fmax(largest, logit);
  std::vector<double> total(output.size(), 0.0);
  double sum = 0;
  size_t s = 0;
  for (const Extent& extent : extents) {
    for (int slot = 0; slot < extent.slots; ++slot, ++s) {
      if (logits[s] == kHiddenLogit) continue;
      const double weight = std::exp(logits[s] - largest);
      const std::byte* value = extent.value + static_cast<size_t>(slot) * row_bytes;
      sum += weight;
      for (int d = 0; d < args.head_dim; ++d) {
        total[static_cast<size_t>(d)] += weight * ElementAt(args.dtype, value, d);
      }
    }
  }
  const bool sees_nothing = sum == 0;
  for (size_t d = 0; d < output.size(); ++d) {
    output[d] = sees_nothing ? 0.0F : static_cast<float>(total[d] / sum);
  }
  lse = static_cast<float>(sees_nothing ? kHiddenLogit : largest + std::log(sum));
}

// The row's attention over each extent alone.
void AttendParts(const AttendArgs& args, size_t row, std::span<const double> logits) {
  const size_t head_dim = static_cast<size_t>(args.head_dim);
  for (size_t x = 0; x < args.extents.size(); ++x) {
    const auto slots = static_cast<size_t>(args.extents[x].slots);
    const size_t part = x * args.lse.size() + row;
    AttendExtents(args, args.extents.subspan(x, 1), logits.first(slots),
                  args.part_output.subspan(part * head_dim, head_dim), args.part_lse[part]);
    logits = logits.subspan(slots);
  }
}

}  // namespace

void AttendReference(const AttendArgs& args) {
  CheckAttend(args);
  const size_t head_dim = static_cast<size_t>(args.head_dim);
  std::vector<double> logits(AttendSlots(args));
  for (size_t row = 0; row < args.lse.size(); ++row) {
    ReferenceLogits(args, row, logits);
    AttendExtents(args, args.extents, logits, args.output.subspan(row * head_dim, head_dim),
                  args.lse[row]);
    if (!args.part_lse.empty()) AttendParts(args, row, logits);
    if (args.logits.empty()) continue;
    for (size_t s = 0; s < logits.size(); ++s) {
      args.logits[row * logits.size() + s] = static_cast<float>(logits[s]);
    }
  }
}

}  // namespace ebbtide::gpu
