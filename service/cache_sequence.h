// SPDX-License-Identifier: Apache-2.0
//
// All that belongs to an open sequence: what the cache knows of it, its policy, and the memory of
// its lanes.

#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "service/calls.h"
#include "service/model/sequence.h"
#include "service/policy/lane_memory.h"
#include "service/policy/policy.h"
#include "service/policy/recall_history.h"
#include "service/policy/scorer.h"

namespace ebbtide::service {

// `facts` is guarded by the cache's lock; the rest is fixed, or belongs to the call in flight of a
// layer. Shared by calls and carriers under way.
struct OpenedSequence {
  OpenedSequence(uint64_t number, const OpenArgs& args, std::shared_ptr<const Model> model,
                 const ResolvedPolicy& resolved);

  Sequence facts;
  const std::shared_ptr<const Model> model;
  const Policy policy;
  PrefillSpec prefill;
  RecallSpec recall;
  int32_t budget_tokens = 0;
  int32_t chunk_tokens = 0;
  std::vector<LaneMemory> memory;             // [layers * kv_heads]
  std::vector<RecallHistory> recall_history;  // [layers]
};
using SequenceRef = std::shared_ptr<OpenedSequence>;

}  // namespace ebbtide::service
