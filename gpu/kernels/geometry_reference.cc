// SPDX-License-Identifier: Apache-2.0
//
// KeyDiff's formula as plain loops in f64.

#include <cmath>
#include <cstddef>
#include <vector>

#include "base/status_macros.h"
#include "gpu/element.h"
#include "gpu/kernels/geometry.h"

namespace ebbtide::gpu {
namespace {

std::vector<double> ReadKey(const GeometryArgs& args, const Extent& extent, size_t s) {
  const auto dim = static_cast<size_t>(args.head_dim);
  const std::byte* row = extent.key + s * dim * DtypeBytes(args.dtype);
  std::vector<double> key(dim);
  for (size_t d = 0; d < dim; ++d) key[d] = ElementAt(args.dtype, row, static_cast<int>(d));
  return key;
}

double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t d = 0; d < a.size(); ++d) sum += a[d] * b[d];
  return sum;
}

}  // namespace

void CheckGeometry(const GeometryArgs& args) {
  EBBTIDE_CHECK(args.head_dim >= 1 && args.head_dim <= kHeadDimMax,
                "geometry: head_dim is 1 to 256");
  size_t slots = 0;
  for (const Extent& extent : args.extents) {
    EBBTIDE_CHECK(extent.slots == 0 || (extent.key != nullptr && extent.index != nullptr),
                  "geometry: an extent has slots but no memory");
    slots += static_cast<size_t>(extent.slots);
  }
  EBBTIDE_CHECK(args.score.size() == slots, "geometry: score is [slots]");
}

void KeyDiffReference(const GeometryArgs& args) {
  CheckGeometry(args);
  double count = 0;
  std::vector<double> anchor(static_cast<size_t>(args.head_dim), 0.0);
  for (const Extent& extent : args.extents) {
    for (size_t s = 0; s < static_cast<size_t>(extent.slots); ++s) {
      if (extent.index[s] == kNoToken) continue;
      const std::vector<double> key = ReadKey(args, extent, s);
      const double norm = std::sqrt(Dot(key, key));
      if (norm == 0) continue;
      ++count;
      for (size_t d = 0; d < key.size(); ++d) anchor[d] += key[d] / norm;
    }
  }
  // The sum of unit keys serves as their mean: the cosine does not see a positive factor.
  const double anchor_norm = std::sqrt(Dot(anchor, anchor));
  const bool has_direction = anchor_norm > kAnchorMin * count;

  size_t slot = 0;
  for (const Extent& extent : args.extents) {
    for (size_t s = 0; s < static_cast<size_t>(extent.slots); ++s, ++slot) {
      args.score[slot] = 0;
      if (extent.index[s] == kNoToken) continue;
      const std::vector<double> key = ReadKey(args, extent, s);
      const double norms = std::sqrt(Dot(key, key)) * anchor_norm;
      if (norms > 0 && has_direction)
        args.score[slot] = static_cast<float>(-Dot(key, anchor) / norms);
    }
  }
}

}  // namespace ebbtide::gpu
