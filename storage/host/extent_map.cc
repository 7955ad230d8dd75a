// SPDX-License-Identifier: Apache-2.0

#include "storage/host/extent_map.h"

#include <algorithm>
#include <iterator>

#include "base/status_macros.h"

namespace ebbtide::storage {

std::optional<Extent> ExtentMap::Allocate(uint64_t bytes) {
  EBBTIDE_CHECK(bytes > 0, "an extent is not empty");
  const auto fit = by_size_.lower_bound({.bytes = bytes, .offset = 0});
  if (fit == by_size_.end()) return std::nullopt;
  const Extent range = {.offset = fit->offset, .bytes = fit->bytes};
  Remove(by_offset_.find(range.offset));
  if (range.bytes > bytes) Insert({.offset = range.offset + bytes, .bytes = range.bytes - bytes});
  return Extent{.offset = range.offset, .bytes = bytes};
}

void ExtentMap::Free(const Extent& extent) {
  EBBTIDE_CHECK(extent.bytes > 0, "an extent is not empty");
  Extent range = extent;
  auto next = by_offset_.lower_bound(extent.offset);
  if (next != by_offset_.end()) {
    EBBTIDE_CHECK(extent.end() <= next->first, "an extent is freed once");
    if (extent.end() == next->first) {
      range.bytes += next->second;
      next = Remove(next);
    }
  }
  if (next != by_offset_.begin()) {
    const auto before = std::prev(next);
    const uint64_t before_end = before->first + before->second;
    EBBTIDE_CHECK(before_end <= extent.offset, "an extent is freed once");
    if (before_end == extent.offset) {
      range = {.offset = before->first, .bytes = before->second + range.bytes};
      Remove(before);
    }
  }
  Insert(range);
}

void ExtentMap::CheckInvariants() const {
  EBBTIDE_CHECK(by_offset_.size() == by_size_.size(), "both indices hold the same ranges");
  uint64_t sum = 0;
  std::optional<uint64_t> previous_end;
  for (const auto& [offset, bytes] : by_offset_) {
    EBBTIDE_CHECK(bytes > 0, "no free range is empty");
    EBBTIDE_CHECK(by_size_.contains({.bytes = bytes, .offset = offset}),
                  "both indices hold the same ranges");
    EBBTIDE_CHECK(!previous_end || *previous_end < offset, "free neighbours are joined");
    previous_end = offset + bytes;
    sum += bytes;
  }
  EBBTIDE_CHECK(sum == free_bytes_, "free bytes are the sum of the ranges");
}

void ExtentMap::Insert(const Extent& extent) {
  by_offset_.emplace(extent.offset, extent.bytes);
  by_size_.insert({.bytes = extent.bytes, .offset = extent.offset});
  free_bytes_ += extent.bytes;
}

ExtentMap::ByOffset::iterator ExtentMap::Remove(ByOffset::iterator range) {
  by_size_.erase({.bytes = range->second, .offset = range->first});
  free_bytes_ -= range->second;
  return by_offset_.erase(range);
}

}  // namespace ebbtide::storage
