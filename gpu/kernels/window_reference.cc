// SPDX-License-Identifier: Apache-2.0
//
// Attention drawn from a window as its formula has it: all logits of a row, their softmax, added to
// each slot; in float64.

#include <cmath>
#include <limits>
#include <vector>

#include "gpu/element.h"
#include "gpu/kernels/window.h"

namespace ebbtide::gpu {
namespace {

constexpr double kHidden = -std::numeric_limits<double>::infinity();

double Logit(const WindowArgs& args, size_t row, const std::byte* key) {
  const float* query = &args.query[row * static_cast<size_t>(args.head_dim)];
  double sum = 0;
  for (int d = 0; d < args.head_dim; ++d) {
    sum += static_cast<double>(query[d]) * ElementAt(args.dtype, key, d);
  }
  return args.scale * sum;
}

// z[s] of one row over all slots; returns the largest.
double Logits(const WindowArgs& args, size_t row, std::vector<double>& logits) {
  const int32_t query_index = args.query_index[row % static_cast<size_t>(args.queries)];
  const size_t row_bytes = static_cast<size_t>(args.head_dim) * DtypeBytes(args.dtype);
  double largest = kHidden;
  size_t s = 0;
  for (const Extent& extent : args.extents) {
    for (int slot = 0; slot < extent.slots; ++slot, ++s) {
      const int32_t index = extent.index[slot];
      const bool sees = index != kNoToken && index <= query_index;
      logits[s] =
          sees ? Logit(args, row, extent.key + static_cast<size_t>(slot) * row_bytes) : kHidden;
      largest = std::fmax(largest, logits[s]);
    }
  }
  return largest;
}

}  // namespace

void WindowReference(const WindowArgs& args) {
  CheckWindow(args);
  const auto rows = static_cast<size_t>(args.group) * static_cast<size_t>(args.queries);
  std::vector<double> logits(args.mass.size());
  std::vector<double> mass(args.mass.size(), 0.0);
  for (size_t row = 0; row < rows; ++row) {
    const double largest = Logits(args, row, logits);
    if (largest == kHidden) continue;  // It sees nothing.
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit - largest);
    for (size_t s = 0; s < logits.size(); ++s) mass[s] += std::exp(logits[s] - largest) / sum;
  }
  for (size_t s = 0; s < mass.size(); ++s) {
    args.mass[s] = static_cast<float>(mass[s] / args.group);
  }
}

}  // namespace ebbtide::gpu
