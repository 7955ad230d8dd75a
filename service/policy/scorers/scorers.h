// SPDX-License-Identifier: Apache-2.0
//
// The list of scorers: one published idea per file of this folder.

#pragma once

#include <cstdint>
#include <memory>

#include "service/policy/scorer.h"

namespace ebbtide::service {

// recency.cc: the newer, the more worth
std::unique_ptr<const Scorer> MakeRecency();
// keydiff.cc: the less like the mean key, the more worth
std::unique_ptr<const Scorer> MakeKeyDiff();
// h2o.cc: attention drawn from all queries so far
std::unique_ptr<const Scorer> MakeH2o();
// tova.cc: attention drawn from the last query
std::unique_ptr<const Scorer> MakeTova();
// snapkv.cc: attention drawn from a window of queries, pooled
std::unique_ptr<const Scorer> MakeSnapKv(int32_t window, int32_t kernel);

}  // namespace ebbtide::service
