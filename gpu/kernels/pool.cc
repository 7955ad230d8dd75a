// SPDX-License-Identifier: Apache-2.0
//
// SnapKV's one-dimensional pooling of mass. Windows are a few tokens wide, so plain loops are
// enough.

#include <algorithm>

#include "base/status_macros.h"
#include "gpu/kernels/mass.h"

namespace ebbtide::gpu {

void CheckPool(const PoolArgs& args) {
  EBBTIDE_CHECK(args.kernel > 0 && args.kernel % 2 == 1, "pool: kernel is odd and positive");
  EBBTIDE_CHECK(args.pooled.size() == args.mass.size(), "pool: pooled is [tokens]");
}

namespace {

// Calls window(token, first, last) for the part of each token's window that lies inside.
template <class Window>
void ForEachWindow(const PoolArgs& args, Window window) {
  CheckPool(args);
  const size_t reach = static_cast<size_t>(args.kernel) / 2;
  const size_t tokens = args.mass.size();
  for (size_t token = 0; token < tokens; ++token) {
    window(token, token - std::min(token, reach), std::min(token + reach, tokens - 1));
  }
}

}  // namespace

void MaxPool(const PoolArgs& args) {
  ForEachWindow(args, [&](size_t token, size_t first, size_t last) {
    float largest = args.mass[first];
    for (size_t j = first + 1; j <= last; ++j) largest = std::max(largest, args.mass[j]);
    args.pooled[token] = largest;
  });
}

void AveragePool(const PoolArgs& args) {
  ForEachWindow(args, [&](size_t token, size_t first, size_t last) {
    double sum = 0;
    for (size_t j = first; j <= last; ++j) sum += args.mass[j];
    args.pooled[token] = static_cast<float>(sum / args.kernel);
  });
}

}  // namespace ebbtide::gpu
