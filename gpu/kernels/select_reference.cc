// SPDX-License-Identifier: Apache-2.0
//
// Selection as its definition has it: sort all that may leave by (score, index), take the first.

#include <algorithm>
#include <cmath>

#include "base/status_macros.h"
#include "gpu/kernels/select.h"

namespace ebbtide::gpu {

std::vector<int32_t> SelectReference(const SelectArgs& args) {
  EBBTIDE_CHECK(args.index.size() == args.score.size(), "select: index is [tokens]");
  EBBTIDE_CHECK(args.eligible.size() == args.score.size(), "select: eligible is [tokens]");
  std::vector<int32_t> order;
  for (size_t token = 0; token < args.score.size(); ++token) {
    if (args.eligible[token] == 0) continue;
    EBBTIDE_CHECK(!std::isnan(args.score[token]), "select: a score is NaN");
    order.push_back(static_cast<int32_t>(token));
  }
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const size_t left = static_cast<size_t>(a);
    const size_t right = static_cast<size_t>(b);
    if (args.score[left] != args.score[right]) return args.score[left] < args.score[right];
    return args.index[left] < args.index[right];
  });
  order.resize(std::min(order.size(), args.count));
  return order;
}

}  // namespace ebbtide::gpu
