// SPDX-License-Identifier: Apache-2.0
//
// What belongs to one lane beside the cache's facts: where its bytes lie, norms, digests, score
// state. Touched only by the call in flight of its layer, so it needs no lock. Tested by
// tests/unit/service/lane_memory_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"

#include "base/status_macros.h"
#include "gpu/device.h"
#include "gpu/extent.h"
#include "gpu/kernels/digest.h"
#include "gpu/shape.h"
#include "service/model/lane.h"

namespace ebbtide::service {

struct LaneMemory {
  // Fixed while the sequence is open.
  gpu::PageShape shape;
  std::byte* frames = nullptr;  // The lane's run of frames in the device pool.

  // By token index.
  std::vector<float> score;  // Latest; larger stays.
  std::vector<double> mass;  // h2o: attention drawn so far; tova: by the last query. Else empty.

  // Of all tokens so far.
  float key_norm_max = 0;
  float value_norm_max = 0;

  std::vector<std::unique_ptr<std::byte[]>> digests;  // One per complete page.

  // snapkv: the last queries.
  std::vector<float> window_query;    // [window, group, head_dim], a ring
  std::vector<int32_t> window_index;  // [window] token indices
  int32_t window_next = 0;            // Ring position of the next query.
  int32_t queries_since_refresh = 0;
  bool is_score_stale = true;

  // Takes note of appended tokens.
  void NoteTokens(std::span<const float> key_norms, std::span<const float> value_norms,
                  bool keeps_mass);
  // Forgets what is known of tokens from `length` on.
  void Truncate(int32_t length);

  std::byte* key_slot(int32_t slot) const {
    EBBTIDE_CHECK(slot >= 0, "bytes are those of a token in a slot");
    return frames + static_cast<size_t>(slot / shape.tokens) * shape.page_bytes() +
           static_cast<size_t>(slot % shape.tokens) * shape.row_bytes();
  }
  std::byte* value_slot(int32_t slot) const { return key_slot(slot) + shape.half_bytes(); }
  std::span<const std::byte> digest(int32_t page) const {
    return {digests[static_cast<size_t>(page)].get(), gpu::DigestBytes(shape.head_dim)};
  }
  int32_t digested_pages() const { return static_cast<int32_t>(digests.size()); }
};

// A lane whose complete pages are to have digests. All lanes of a call have one shape.
struct LaneToDigest {
  const Lane& lane;
  LaneMemory& memory;
};

// Draws the digest of each page that is complete and has none yet; its tokens are all in slots.
//   kResourceExhausted, kUnavailable  as gpu::Device::Run
absl::Status DigestCompletePages(std::span<const LaneToDigest> lanes, const gpu::Device& device);

// Where the tokens first .. end of a lane lie, all of them in slots.
struct SlotsOfTokens {
  std::vector<const std::byte*> keys;
  std::vector<const std::byte*> values;
};
SlotsOfTokens FindSlots(const LaneMemory& memory, const Lane& lane, int32_t first, int32_t end);

// The frames that hold resident tokens: a lane has frames for a chunk more than its budget, and
// those that stand empty are not worth a look.
struct WorkingFrames {
  std::vector<int32_t> slot_index;   // [slots of these frames] token, or gpu::kNoToken
  std::vector<gpu::Extent> extents;  // Into slot_index, so that this may be moved, not copied.
};
// `slot_index` [slots] of the lane.
WorkingFrames FindWorkingFrames(const LaneMemory& memory, std::span<const int32_t> slot_index);

// Host bytes that one block adds to a sequence beside its record: digests, norms, score state,
// positions and slot numbers of its tokens.
uint64_t MetadataBytesPerBlock(const gpu::PageShape& shape, int lanes, bool keeps_mass);

// Host bytes of a lane without tokens: what it keeps per slot, and the policy's window of queries.
uint64_t MetadataBytesPerLane(int head_dim, int group, int32_t slots, int32_t window);

}  // namespace ebbtide::service
