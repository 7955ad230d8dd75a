// SPDX-License-Identifier: Apache-2.0
//
// Is there room below the device for all that open sequences have begun? Each block begun is
// promised a place there before its tokens are taken. Records of different sizes share the host
// tier's bytes; the tier below keeps room for each size, which no other size can have. Tested by
// tests/unit/service/lower_room_test.cc.

#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace ebbtide::service {

// How many records are promised a place, by their bytes.
using PromisedRecords = std::map<uint64_t, uint64_t>;

// What the lower tiers could hold in all.
struct LowerRoom {
  struct Size {
    uint64_t host_cost_bytes = 1;    // Of one record in the host tier.
    uint64_t kept_below = 0;         // Records that fit below without `below_bytes`.
    uint64_t run_records_below = 1;  // More come in runs of so many,
    uint64_t run_bytes_below = 0;    // each for so many of them; 0: none comes.
  };
  uint64_t host_bytes = 0;              // Metadata takes of them first.
  uint64_t below_bytes = 0;             // For records of any size.
  std::map<uint64_t, Size> sizes = {};  // By record bytes.
  std::string below_why = "";           // Why the tier below takes no records of this size now.

  // How many records of `record_bytes` fit beside `promised` and `metadata_bytes`; none where those
  // alone do not fit.
  std::optional<uint64_t> RecordsLeft(uint64_t record_bytes, const PromisedRecords& promised,
                                      uint64_t metadata_bytes) const;
};

}  // namespace ebbtide::service
