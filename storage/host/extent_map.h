// SPDX-License-Identifier: Apache-2.0
//
// Which byte ranges of an arena are free. Best fit: the smallest range that is large enough, the
// lowest of equals; neighbours are joined when freed, so records of one size never fragment it.

#pragma once

#include <cstdint>
#include <optional>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"

namespace ebbtide::storage {

struct Extent {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t end() const { return offset + bytes; }
  friend bool operator==(const Extent&, const Extent&) = default;
};

// Thread-compatible. Starts with nothing free.
class ExtentMap {
 public:
  // `bytes` of a free range, or nothing where no range is that long. bytes > 0.
  std::optional<Extent> Allocate(uint64_t bytes);

  // Makes `extent` free. Broken contract where a part of it is free already.
  void Free(const Extent& extent);

  uint64_t free_bytes() const { return free_bytes_; }
  size_t ranges() const { return by_offset_.size(); }

  // Both indices hold the same ranges, no two of which touch; their sum is free_bytes().
  void CheckInvariants() const;

 private:
  struct BySize {
    uint64_t bytes;
    uint64_t offset;
    friend auto operator<=>(const BySize&, const BySize&) = default;
  };
  using ByOffset = absl::btree_map<uint64_t, uint64_t>;  // offset to bytes

  void Insert(const Extent& extent);
  ByOffset::iterator Remove(ByOffset::iterator range);  // To the range behind it.

  ByOffset by_offset_;
  absl::btree_set<BySize> by_size_;
  uint64_t free_bytes_ = 0;
};

}  // namespace ebbtide::storage
