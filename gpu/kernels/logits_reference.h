// SPDX-License-Identifier: Apache-2.0
//
// Logits as their formula has them, in float64: what the references of attend and window share.
// Tested with both.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gpu/element.h"
#include "gpu/extent.h"

namespace ebbtide::gpu {

inline constexpr double kHiddenLogit = -std::numeric_limits<double>::infinity();

// z[s] of one row over all slots of `args`, AttendArgs or WindowArgs; kHiddenLogit where the row
// does not see the slot. Returns the largest.
template <class Args>
double ReferenceLogits(const Args& args, size_t row, std::vector<double>& logits) {
  const int32_t query_index = args.query_index[row % static_cast<size_t>(args.queries)];
  const float* const query = &args.query[row * static_cast<size_t>(args.head_dim)];
  const size_t row_bytes = RowBytes(args.dtype, args.head_dim);
  double largest = kHiddenLogit;
  size_t s = 0;
  for (const Extent& extent : args.extents) {
    for (int slot = 0; slot < extent.slots; ++slot, ++s) {
      logits[s] = kHiddenLogit;
      if (extent.index[slot] == kNoToken || extent.index[slot] > query_index) continue;
      const std::byte* const key = extent.key + static_cast<size_t>(slot) * row_bytes;
      double sum = 0;
      for (int d = 0; d < args.head_dim; ++d) {
        sum += static_cast<double>(query[d]) * ElementAt(args.dtype, key, d);
      }
      logits[s] = args.scale * sum;
      largest = std::fmax(largest, logits[s]);
    }
  }
  return largest;
}

}  // namespace ebbtide::gpu
