// SPDX-License-Identifier: Apache-2.0
//
// Attention drawn from a window as its formula has it: all logits of a row, their softmax, added to
// each slot; in float64.

#include <cmath>
#include <vector>

#include "gpu/kernels/logits_reference.h"
#include "gpu/kernels/window.h"

namespace ebbtide::gpu {
void WindowReference(const WindowArgs& args) {
  CheckWindow(args);
  const auto rows = static_cast<size_t>(args.group) * static_cast<size_t>(args.queries);
  std::vector<double> logits(args.mass.size());
  std::vector<double> mass(args.mass.size(), 0.0);
  for (size_t row = 0; row < rows; ++row) {
    const double largest = ReferenceLogits(args, row, logits);
    if (largest == kHiddenLogit) continue;  // It sees nothing.
    double sum = 0;
    for (const double logit : logits) sum += std::exp(logit - largest);
    for (size_t s = 0; s < logits.size(); ++s) mass[s] += std::exp(logits[s] - largest) / sum;
  }
  for (size_t s = 0; s < mass.size(); ++s) {
    args.mass[s] = static_cast<float>(mass[s] / args.group);
  }
}

}  // namespace ebbtide::gpu
