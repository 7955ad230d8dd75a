// SPDX-License-Identifier: Apache-2.0
//
// What every implementation of window shares: its contract's checks and its error bound.

#include "gpu/kernels/window.h"

#include <cmath>

#include "base/status_macros.h"
#include "gpu/outward.h"

namespace ebbtide::gpu {

size_t WindowSlots(const WindowArgs& args) {
  size_t slots = 0;
  for (const Extent& extent : args.extents) slots += static_cast<size_t>(extent.slots);
  return slots;
}

void CheckWindow(const WindowArgs& args) {
  EBBTIDE_CHECK(args.head_dim >= 1 && args.head_dim <= kHeadDimMax, "window: head_dim is 1 to 256");
  EBBTIDE_CHECK(args.group >= 1 && args.group <= kGroupMax, "window: group is 1 to 16");
  EBBTIDE_CHECK(args.queries >= 0, "window: queries is not negative");
  const size_t rows = static_cast<size_t>(args.group) * static_cast<size_t>(args.queries);
  EBBTIDE_CHECK(args.query.size() == rows * static_cast<size_t>(args.head_dim),
                "window: query is [group, queries, head_dim]");
  EBBTIDE_CHECK(args.query_index.size() == static_cast<size_t>(args.queries),
                "window: query_index is [queries]");
  for (const Extent& extent : args.extents) {
    EBBTIDE_CHECK(extent.slots >= 0 && extent.slots <= kPageTokensMax,
                  "window: an extent has 0 to 64 slots");
    EBBTIDE_CHECK(extent.slots == 0 || (extent.key != nullptr && extent.index != nullptr),
                  "window: an extent has slots but no memory");
  }
  EBBTIDE_CHECK(args.mass.size() == WindowSlots(args), "window: mass is [slots]");
}

// A logit, relative to |scale| |query| |key|, which bounds scale * sum_d |q_d k_d|, in roundings to
// f32 in a row:
//   CPU      head_dim fused products one after the other, and the scaling: head_dim + 1
//   CUDA     f32: the same. f16 on tensor cores, which do not round but cut off: 8 products and the
//            sum before, aligned to the largest, lose 2 roundings' worth each, 18 in all, at 4 such
//            steps per 16 channels: 4.5 head_dim. Two f16 parts of a query leave 2^-22: 4. bf16
//            the same at 6 steps, for three parts: 6.75 head_dim
// Softmax subtracts a maximum or the log-sum-exp, and rounds: 4 more. An error of z moves a weight
// and the sum that it is divided by. The rest: exponentials (3, 4 on CUDA) and their products with
// e^(top - top), sums over the rows that a thread adds up (1/32 of them on CUDA, 9 and f64 on the
// CPU), and lse as f32 on CUDA, of which log(slots) <= 22 is not counted above.
float WindowError(const WindowArgs& args, float query_norm, float key_norm) {
  constexpr double kUnit = 0x1p-24;
  const double rows = static_cast<double>(args.group) * args.queries;
  const double size = std::fabs(static_cast<double>(args.scale)) * query_norm * key_norm;
  const double channel = args.dtype == Dtype::kBF16 ? 7.0 : 5.0;
  const double logit = (channel * args.head_dim + 16.0) * kUnit * size;
  const double sums = (rows / 32 + 9 + 22 + 24) * kUnit;
  return FloatUp(std::expm1(2 * logit + sums) * (1 + 1e-6));
}

}  // namespace ebbtide::gpu
