// SPDX-License-Identifier: Apache-2.0
//
// The list of scorers: one published idea per file of this folder.

#pragma once

#include <cstdint>
#include <memory>

#include "service/policy/scorer.h"

namespace ebbtide::service {

std::unique_ptr<const Scorer> MakeRecency();  // recency.cc: the newer, the more worth
std::unique_ptr<const Scorer>
MakeKeyDiff();                             // keydiff.cc: the less like the mean key, the more worth
std::unique_ptr<const Scorer> MakeH2o();   // h2o.cc: attention drawn from all queries so far
std::unique_ptr<const Scorer> MakeTova();  // tova.cc: attention drawn from the last query
// snapkv.cc: attention drawn from a window of queries, pooled
std::unique_ptr<const Scorer> MakeSnapKv(int32_t window, int32_t kernel);

}  // namespace ebbtide::service
