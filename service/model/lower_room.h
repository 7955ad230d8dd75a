// SPDX-License-Identifier: Apache-2.0
//
// Is there room below the device for all that open sequences have begun? Each block begun is
// promised a place there before its tokens are taken. Records of different sizes share the host
// tier's bytes; the tier below has slots for each size, which no other size can have. Tested by
// tests/unit/service/lower_room_test.cc.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>

#include "storage/block_record.h"

namespace ebbtide::service {

// How many records are promised a place.
using PromisedRecords = std::map<storage::RecordSize, uint64_t>;

// What the lower tiers could hold in all, at one moment.
struct LowerRoom {
  struct Size {
    uint64_t host_cost_bytes = 1;  // Of one record in the host tier.
    // In the tier below, as storage::SizeRoom.
    uint64_t slots_made = 0;
    uint64_t segment_slots = 0;  // 0: no segment can be made.
    uint64_t segment_bytes = 0;
    uint64_t segments_begun = 0;
  };
  uint64_t host_bytes = 0;                         // Metadata takes of them first.
  uint64_t below_bytes = 0;                        // For segments of any size.
  std::map<storage::RecordSize, Size> sizes = {};  // All that it is asked about.
  std::string below_why = "";                      // Why the tier below takes no records now.

  // The tier below takes no more than what it holds of the promised records.
  void FreezeBelow(const PromisedRecords& held);

  // A segment for records of `size` is made. False where the bytes for it are not there.
  bool TakeSegment(const storage::RecordSize& size);

  // Can all that is promised be placed beside the metadata: in slots below that are made, in whole
  // segments that can be made, and the rest in the host? What fits, fits with less promised too.
  // Exact, but that many sizes at their limits are given up on: then it says no.
  bool Fits(const PromisedRecords& promised, uint64_t metadata_bytes) const;

  // How many records of `size` fit beside `promised`; 0 where those alone do not.
  uint64_t RecordsLeft(const storage::RecordSize& size, const PromisedRecords& promised,
                       uint64_t metadata_bytes) const;
};

// Looks at the room for records of each of `sizes`. From memory, and without the cache.
using LookAtRoom = std::function<LowerRoom(std::span<const storage::RecordSize> sizes)>;

}  // namespace ebbtide::service
