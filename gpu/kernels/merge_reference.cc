// SPDX-License-Identifier: Apache-2.0
//
// The merge of two partial attentions, row by row in float64.

#include <cmath>
#include <limits>

#include "base/status_macros.h"
#include "gpu/kernels/merge.h"

namespace ebbtide::gpu {

void CheckMerge(const MergeArgs& args) {
  EBBTIDE_CHECK(args.rows >= 0 && args.head_dim >= 1, "merge: rows >= 0, head_dim >= 1");
  const size_t rows = static_cast<size_t>(args.rows);
  const size_t elements = rows * static_cast<size_t>(args.head_dim);
  EBBTIDE_CHECK(args.lse.size() == rows, "merge: lse is [rows]");
  EBBTIDE_CHECK(args.part_lse.size() == rows, "merge: part_lse is [rows]");
  EBBTIDE_CHECK(args.output.size() == elements, "merge: output is [rows, head_dim]");
  EBBTIDE_CHECK(args.part_output.size() == elements, "merge: part_output is [rows, head_dim]");
}

void MergeReference(const MergeArgs& args) {
  CheckMerge(args);
  const size_t head_dim = static_cast<size_t>(args.head_dim);
  for (size_t row = 0; row < args.lse.size(); ++row) {
    const double lse = args.lse[row];
    const double part_lse = args.part_lse[row];
    if (part_lse == -std::numeric_limits<double>::infinity()) continue;  // The part saw nothing.
    const double largest = std::fmax(lse, part_lse);
    const double mass = std::exp(lse - largest);
    const double part_mass = std::exp(part_lse - largest);
    const double weight = mass / (mass + part_mass);
    const double part_weight = part_mass / (mass + part_mass);
    for (size_t d = row * head_dim; d < (row + 1) * head_dim; ++d) {
      args.output[d] =
          static_cast<float>(weight * args.output[d] + part_weight * args.part_output[d]);
    }
    args.lse[row] = static_cast<float>(largest + std::log(mass + part_mass));
  }
}

}  // namespace ebbtide::gpu
