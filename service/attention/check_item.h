// SPDX-License-Identifier: Apache-2.0
//
// Is what a worker sent for one step right for its model? Asked before anything changes.
// Tested by tests/unit/service/check_item_test.cc.

#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"

#include "service/cache.h"
#include "service/calls.h"

namespace ebbtide::service {

// Tokens that the item brings or asks for: the first dimension of its tensors. 0 where it has none.
int32_t TokensOf(const StepItem& item);

// Layer, tensors, shapes, dtypes, sizes, positions, the chunk's limit, and that every element is
// finite.
//   kInvalidArgument  LAYER_OUT_OF_RANGE, TENSORS_MISSING, TOO_MANY_TOKENS, POSITIONS_MISMATCH,
//                     SHAPE_MISMATCH, SIZE_MISMATCH, DTYPE_MISMATCH or NOT_FINITE: names the field,
//                     the value and the limit
absl::Status CheckItem(const OpenedSequence& sequence, const StepCall& call, const StepItem& item);

// XXH3-128 of dtype, shape, k and v.
CallDigest DigestOf(const StepItem& item);

// The item's queries in f32, by kv head: [kv_heads][group, queries, head_dim].
std::vector<std::vector<float>> QueriesByLane(const Geometry& geometry, const TensorView& q);

}  // namespace ebbtide::service
