// SPDX-License-Identifier: Apache-2.0
//
// Lanes of a batch that one launch can take: those of one dtype and head_dim.

#pragma once

#include <algorithm>
#include <span>
#include <vector>

#include "absl/status/status.h"

#include "base/status_macros.h"
#include "gpu/shape.h"

namespace ebbtide::gpu {

// Calls run(group) for lanes of one shape each, which is once unless lanes of several models meet.
template <class Args, class Run>
absl::Status ForEachShape(std::span<const Args> lanes, Run run) {
  std::vector<const Args*> left;
  for (const Args& args : lanes) left.push_back(&args);
  while (!left.empty()) {
    const Dtype dtype = left[0]->dtype;
    const int head_dim = left[0]->head_dim;
    const auto others = std::stable_partition(left.begin(), left.end(), [&](const Args* args) {
      return args->dtype == dtype && args->head_dim == head_dim;
    });
    EBBTIDE_RETURN_IF_ERROR(run(std::span<const Args* const>(left.begin(), others)));
    left.erase(left.begin(), others);
  }
  return absl::OkStatus();
}

}  // namespace ebbtide::gpu
