// SPDX-License-Identifier: Apache-2.0
//
// What every implementation of attend shares: its contract's checks and its error bounds.

#include "gpu/kernels/attend.h"

#include <cmath>
#include <limits>

#include "base/status_macros.h"

namespace ebbtide::gpu {
namespace {

float RoundedUp(double value) {
  const float nearest = static_cast<float>(value);
  return nearest < value ? std::nextafter(nearest, std::numeric_limits<float>::infinity())
                         : nearest;
}

}  // namespace

size_t AttendSlots(const AttendArgs& args) {
  size_t slots = 0;
  for (const Extent& extent : args.extents) slots += static_cast<size_t>(extent.slots);
  return slots;
}

void CheckAttend(const AttendArgs& args) {
  EBBTIDE_CHECK(args.head_dim >= 1 && args.head_dim <= kHeadDimMax, "attend: head_dim is 1 to 256");
  EBBTIDE_CHECK(args.group >= 1 && args.group <= kGroupMax, "attend: group is 1 to 16");
  EBBTIDE_CHECK(args.queries >= 0, "attend: queries is not negative");
  const size_t rows = static_cast<size_t>(args.group) * static_cast<size_t>(args.queries);
  const size_t head_dim = static_cast<size_t>(args.head_dim);
  EBBTIDE_CHECK(args.query.size() == rows * head_dim,
                "attend: query is [group, queries, head_dim]");
  EBBTIDE_CHECK(args.output.size() == rows * head_dim,
                "attend: output is [group, queries, head_dim]");
  EBBTIDE_CHECK(args.query_index.size() == static_cast<size_t>(args.queries),
                "attend: query_index is [queries]");
  EBBTIDE_CHECK(args.lse.size() == rows, "attend: lse is [group, queries]");
  for (const Extent& extent : args.extents) {
    EBBTIDE_CHECK(extent.slots >= 0, "attend: an extent has a negative number of slots");
    EBBTIDE_CHECK(extent.slots == 0 ||
                      (extent.key != nullptr && extent.value != nullptr && extent.index != nullptr),
                  "attend: an extent has slots but no memory");
  }
  EBBTIDE_CHECK(args.logits.empty() || args.logits.size() == rows * AttendSlots(args),
                "attend: logits is [group, queries, slots] or empty");
}

// A logit is head_dim products, summed in at least four lanes (the narrowest SIMD target), the
// lanes summed pairwise, the sum scaled. Each product is rounded at most once, and meets at most
// ceil(head_dim / 4) - 1 rounded additions in its lane, 2 between lanes and the scaling: 3 +
// ceil(head_dim / 4) roundings of 2^-24 each, so the error is at most gamma(that) * scale *
// sum_d |q_d k_d| (Higham, Accuracy and Stability, 3.1), and the sum is at most |query| |key|
// (Cauchy-Schwarz). Wider targets add more lanes but fewer elements in each; with L lanes the count
// is ceil(head_dim / L) + min(log2 L, log2 head_dim) + 1, never above. Softmax subtracts the
// running maximum, rounded too: |z - max| <= 2 scale |query| |key|, two roundings more. Products
// below the normal range lose at most 2^-150 each.
float AttendLogitError(int head_dim, float scale, float query_norm, float key_norm) {
  constexpr double kUnit = 0x1p-24;
  const double roundings = 5.0 + (head_dim + 3) / 4;
  const double gamma = roundings * kUnit / (1 - roundings * kUnit);
  const double size = std::fabs(static_cast<double>(scale));
  const double underflow = (head_dim * size + 1) * 0x1p-149;
  return RoundedUp(gamma * size * query_norm * key_norm * (1 + 1e-12) + underflow);
}

}  // namespace ebbtide::gpu
