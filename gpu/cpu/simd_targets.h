// SPDX-License-Identifier: Apache-2.0
//
// The SIMD targets that the kernels were built for, and which of them runs. The best one this CPU
// has is chosen at the first call; tests and operators may ask for a lesser one.
// Tested by tests/unit/gpu/simd_targets_test.cc.

#pragma once

#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace ebbtide::gpu {

// Names of the targets this build has and this CPU can run, best first: "avx512", "avx2", "sse4".
std::vector<std::string_view> SimdTargets();

// The one that runs.
std::string_view ChosenSimdTarget();

// Makes every kernel run `name` from now on; "auto" is the best. Not while kernels run.
//   kInvalidArgument  no such target, or not on this CPU; the message lists those there are
absl::Status ForceSimdTarget(std::string_view name);

}  // namespace ebbtide::gpu
