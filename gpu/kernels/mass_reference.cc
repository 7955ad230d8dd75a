// SPDX-License-Identifier: Apache-2.0
//
// Attention drawn by each slot, as the double sum over the group and its queries.

#include <cmath>
#include <limits>

#include "base/status_macros.h"
#include "gpu/kernels/mass.h"

namespace ebbtide::gpu {

void CheckMass(const MassArgs& args) {
  EBBTIDE_CHECK(args.group >= 1 && args.queries >= 0 && args.slots >= 0,
                "mass: group >= 1, queries >= 0, slots >= 0");
  const size_t rows = static_cast<size_t>(args.group) * static_cast<size_t>(args.queries);
  const size_t slots = static_cast<size_t>(args.slots);
  EBBTIDE_CHECK(args.logits.size() == rows * slots, "mass: logits are [group, queries, slots]");
  EBBTIDE_CHECK(args.lse.size() == rows, "mass: lse is [group, queries]");
  EBBTIDE_CHECK(args.mass.size() == slots, "mass: mass is [slots]");
}

void MassReference(const MassArgs& args) {
  CheckMass(args);
  const size_t rows = args.lse.size();
  const size_t slots = args.mass.size();
  for (size_t s = 0; s < slots; ++s) {
    double sum = 0;
    for (size_t row = 0; row < rows; ++row) {
      const double lse = args.lse[row];
      if (lse == -std::numeric_limits<double>::infinity()) continue;
      sum += std::exp(static_cast<double>(args.logits[row * slots + s]) - lse);
    }
    args.mass[s] += sum / args.group;
  }
}

}  // namespace ebbtide::gpu
