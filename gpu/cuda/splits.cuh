// SPDX-License-Identifier: Apache-2.0
//
// Lanes cut into splits of 256 slots, or of the whole extents that these have room for, one for a
// block: where the slots of a split lie, on the host and on the device. Where the cuts are is part
// of what makes answers repeat.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status_macros.h"
#include "gpu/cuda/port.h"
#include "gpu/cuda/warp.cuh"
#include "gpu/extent.h"

namespace ebbtide::gpu {

inline constexpr int kSplitSlots = 256;

// The extents of all lanes of a launch in one list; `first_slot` counts within the lane.
struct PlacedExtent {
  Extent extent;
  uint32_t first_slot;
};

struct LaneSplits {
  uint32_t slots = 0;
  uint32_t extents_end = 0;             // Behind its last in the list.
  std::vector<uint32_t> first_extents;  // For each split the extent that holds its first slot.
};

// Stops the process unless an extent's rows, of so many bytes each, can be read 16 at a time where
// that goes.
inline void CheckAligned(const Extent& extent, size_t row_bytes) {
  const auto addresses =
      reinterpret_cast<uintptr_t>(extent.key) | reinterpret_cast<uintptr_t>(extent.value);
  EBBTIDE_CHECK(row_bytes % 16 != 0 || addresses % 16 == 0,
                "keys and values of an extent are 16-byte aligned");
}

// Adds a lane's extents to the list. A lane of no slots has one split, for somebody must say so.
inline LaneSplits PlaceExtents(std::span<const Extent> extents, size_t row_bytes,
                               std::vector<PlacedExtent>& placed) {
  LaneSplits lane;
  lane.first_extents.reserve(extents.size() * kPageTokensMax / kSplitSlots + 1);
  const auto first = static_cast<uint32_t>(placed.size());
  for (const Extent& extent : extents) {
    if (extent.slots == 0) continue;
    CheckAligned(extent, row_bytes);
    const auto at = static_cast<uint32_t>(placed.size());
    placed.push_back({extent, lane.slots});
    lane.slots += static_cast<uint32_t>(extent.slots);
    while (lane.first_extents.size() * kSplitSlots < lane.slots) lane.first_extents.push_back(at);
  }
  if (lane.slots == 0) lane.first_extents.push_back(first);
  lane.extents_end = static_cast<uint32_t>(placed.size());
  return lane;
}

// What a block of a lane's split needs to know.
struct Split {
  uint32_t lane;
  uint32_t number, count;  // Which of how many of its lane.
  uint32_t first_extent, extents_end;
};

inline void AddSplits(uint32_t lane, const LaneSplits& placed, std::vector<Split>& splits) {
  const auto count = static_cast<uint32_t>(placed.first_extents.size());
  for (uint32_t number = 0; number < count; ++number) {
    splits.push_back({.lane = lane,
                      .number = number,
                      .count = count,
                      .first_extent = placed.first_extents[number],
                      .extents_end = placed.extents_end});
  }
}

// Adds a lane's extents to the list and its splits to theirs, of whole extents each: at most
// `extents_max`, those without slots too. Returns how many slots the lane has.
inline uint32_t AddWholeSplits(uint32_t lane, std::span<const Extent> extents, size_t row_bytes,
                               uint32_t extents_max, std::vector<PlacedExtent>& placed,
                               std::vector<Split>& splits) {
  const size_t first_split = splits.size();
  uint32_t slots = 0;
  for (const Extent& extent : extents) {
    CheckAligned(extent, row_bytes);
    const auto at = static_cast<uint32_t>(placed.size());
    placed.push_back({extent, slots});
    slots += static_cast<uint32_t>(extent.slots);
    const bool is_first = splits.size() == first_split;
    if (is_first || slots - placed[splits.back().first_extent].first_slot > kSplitSlots ||
        at - splits.back().first_extent >= extents_max) {
      splits.push_back({.lane = lane,
                        .number = static_cast<uint32_t>(splits.size() - first_split),
                        .count = 0,
                        .first_extent = at,
                        .extents_end = at});
    }
    splits.back().extents_end = at + 1;
  }
  for (size_t i = first_split; i < splits.size(); ++i) {
    splits[i].count = static_cast<uint32_t>(splits.size() - first_split);
  }
  return slots;
}

// Calls visit(s, extent, i) for each slot of the split, which begins at the lane's slot
// `split_first`: its s-th is the extent's i-th. A warp for each extent, a thread for each slot.
template <class Visit>
__device__ __forceinline__ void ForEachSlot(const PlacedExtent* extents, const Split& split,
                                            int split_first, Visit visit) {
  const unsigned warps = blockDim.x / kWarpThreads;
  for (uint32_t e = split.first_extent + threadIdx.x / kWarpThreads; e < split.extents_end;
       e += warps) {
    const PlacedExtent placed = extents[e];
    const int first = static_cast<int>(placed.first_slot) - split_first;
    if (first >= kSplitSlots) break;
    for (int i = static_cast<int>(threadIdx.x % kWarpThreads); i < placed.extent.slots;
         i += kWarpThreads) {
      if (first + i >= 0 && first + i < kSplitSlots) visit(first + i, placed.extent, i);
    }
  }
}
// The same of a split that is not of whole extents.
template <class Visit>
__device__ __forceinline__ void ForEachSlot(const PlacedExtent* extents, const Split& split,
                                            Visit visit) {
  ForEachSlot(extents, split, static_cast<int>(split.number) * kSplitSlots, visit);
}

// How many slots the split has.
__device__ __forceinline__ int SlotsOf(const Split& split, uint32_t lane_slots) {
  return min(static_cast<int>(lane_slots) - static_cast<int>(split.number) * kSplitSlots,
             kSplitSlots);
}

// Whether this block is the last of its lane to get here: it then sees what the others wrote
// before. `shared_flag` is the block's own; `ticket` is 0 before the launch.
__device__ __forceinline__ bool IsLastBlock(unsigned* ticket, unsigned blocks, bool* shared_flag) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) *shared_flag = atomicAdd(ticket, 1U) + 1 == blocks;
  __syncthreads();
  if (*shared_flag) __threadfence();
  return *shared_flag;
}

}  // namespace ebbtide::gpu
