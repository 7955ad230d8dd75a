// SPDX-License-Identifier: Apache-2.0
//
// SlotTiles lists the slots of extents that somebody may see, a tile at a time, and one tile ahead,
// so that a kernel can prefetch what comes next. Hidden slots never enter, so their bytes are never
// touched, and tiles are full whatever holes the extents have.
// Tested by tests/unit/gpu/slot_tiles_test.cc.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "gpu/extent.h"

namespace ebbtide::gpu {

struct SlotTile {
  static constexpr int kSlotsMax = 64;

  int slots = 0;
  size_t extent = 0;  // That holds its last slot.
  std::array<const std::byte*, kSlotsMax> key;
  std::array<const std::byte*, kSlotsMax> value;
  std::array<int32_t, kSlotsMax> index;
  std::array<int32_t, kSlotsMax>
      column;  // Counts all slots, hidden ones too, from the first extent.
};

// Thread-compatible. Nothing of an extent but its index is read here.
class SlotTiles {
 public:
  struct Options {
    std::span<const Extent> extents;  // The tail of a lane's list.
    size_t count = 0;                 // Extents to list; those after are looked ahead at only.
    size_t row_bytes = 0;
    int32_t index_limit = 0;         // The largest index that anybody sees.
    bool ends_with_extents = false;  // Tiles end where extents do, each of at most kSlotsMax slots.
  };

  explicit SlotTiles(const Options& options);

  // Moves to the next tile of the listed extents; false at the end.
  bool Advance();

  const SlotTile& tile() const { return tile_[current_]; }
  // What follows, perhaps past the listed extents; empty at the end of the lane.
  const SlotTile& next() const { return tile_[1 - current_]; }

 private:
  void Fill(SlotTile& tile);
  void Append(const Extent& extent, int count, SlotTile& tile);

  // Fixed after construction.
  const size_t row_bytes_;
  const uint32_t index_limit_;
  const bool ends_with_extents_;
  const Extent* const first_;
  const Extent* const listed_end_;
  const Extent* const end_;

  const Extent* extent_;  // Where filling goes on.
  int32_t slot_ = 0;
  int32_t column_ = 0;
  bool is_next_listed_ = false;
  size_t current_ = 0;
  std::array<SlotTile, 2> tile_;
};

}  // namespace ebbtide::gpu
