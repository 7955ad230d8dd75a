// SPDX-License-Identifier: Apache-2.0
//
// What the cache tells carriers of a block to take down, and they tell it of how that ended.

#pragma once

#include <cstdint>
#include <vector>

#include "service/cache_sequence.h"
#include "storage/block_key.h"

namespace ebbtide::service {

// One block to copy down, or one level further down.
struct CarryPlan {
  SequenceRef sequence;
  int32_t block = 0;
  storage::BlockKey key;
  std::vector<int64_t> positions = {};  // Seal: [page_tokens]
  std::vector<int32_t> slots = {};      // Seal: [lanes, page_tokens]
  uint64_t arrival = 0;                 // Its place among those that wait (model/block_queue.h).
};

enum class CarryOutcome : uint8_t {
  kMoved,
  kRetry,  // The tier below did not take it: it keeps its place among those that wait.
  kLost,   // The tier it was in no longer has it whole: it stays named there, and reads say so.
};

}  // namespace ebbtide::service
