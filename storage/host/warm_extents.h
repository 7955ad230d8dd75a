// SPDX-License-Identifier: Apache-2.0
//
// Free extents of an arena that still hold memory: each stays as it was, for the next record of
// just its size, since what a device was made to reach is one piece and can't be cut.
// Tested by tests/unit/storage/arena_pool_test.cc.

#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <vector>

#include "storage/host/extent_map.h"

namespace ebbtide::storage {

// Thread-compatible.
class WarmExtents {
 public:
  // The last one of this size that came; nothing where there is none.
  std::optional<Extent> Take(uint64_t bytes) { return TakeFrom(by_bytes_.find(bytes)); }

  // One of the longest; nothing where all are taken.
  std::optional<Extent> TakeLongest() {
    return TakeFrom(by_bytes_.empty() ? by_bytes_.end() : std::prev(by_bytes_.end()));
  }

  void Put(const Extent& extent) {
    by_bytes_[extent.bytes].push_back(extent);
    bytes_ += extent.bytes;
  }

  uint64_t bytes() const { return bytes_; }  // Of all.

 private:
  using ByBytes = std::map<uint64_t, std::vector<Extent>>;  // No list is empty.

  std::optional<Extent> TakeFrom(ByBytes::iterator extents) {
    if (extents == by_bytes_.end()) return std::nullopt;
    const Extent taken = extents->second.back();
    extents->second.pop_back();
    if (extents->second.empty()) by_bytes_.erase(extents);
    bytes_ -= taken.bytes;
    return taken;
  }

  ByBytes by_bytes_;
  uint64_t bytes_ = 0;
};

}  // namespace ebbtide::storage
