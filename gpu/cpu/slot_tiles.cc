// SPDX-License-Identifier: Apache-2.0

#include "gpu/cpu/slot_tiles.h"

#include <algorithm>

namespace ebbtide::gpu {

SlotTiles::SlotTiles(const Options& options)
    : row_bytes_(options.row_bytes),
      index_limit_(static_cast<uint32_t>(options.index_limit)),
      ends_with_extents_(options.ends_with_extents),
      first_(options.extents.data()),
      listed_end_(options.extents.data() + options.count),
      end_(options.extents.data() + options.extents.size()),
      extent_(options.index_limit < 0 ? end_ : options.extents.data()) {
  Fill(tile_[1]);
}

bool SlotTiles::Advance() {
  if (!is_next_listed_) return false;
  current_ = 1 - current_;
  Fill(tile_[1 - current_]);
  return true;
}

// A tile ends where the listed extents end, so that it is listed as a whole or not; where it is
// asked for, at each extent's end.
void SlotTiles::Fill(SlotTile& tile) {
  tile.slots = 0;
  while (extent_ != end_ && tile.slots < SlotTile::kSlotsMax) {
    if (tile.slots > 0 && (ends_with_extents_ || extent_ == listed_end_)) break;
    is_next_listed_ = extent_ < listed_end_;
    const int count = std::min(extent_->slots - slot_, SlotTile::kSlotsMax - tile.slots);
    Append(*extent_, count, tile);
    tile.extent = static_cast<size_t>(extent_ - first_);
    slot_ += count;
    column_ += count;
    if (slot_ == extent_->slots) {
      ++extent_;
      slot_ = 0;
    }
  }
  is_next_listed_ = is_next_listed_ && tile.slots > 0;
}

void SlotTiles::Append(const Extent& extent, int count, SlotTile& tile) {
  const int32_t* const index = extent.index + slot_;
  const std::byte* const key = extent.key + static_cast<size_t>(slot_) * row_bytes_;
  const std::byte* const value = extent.value + static_cast<size_t>(slot_) * row_bytes_;
  // As unsigned numbers, indices up to the limit pass and kNoToken does not: one comparison.
  int visible = 0;
  for (int i = 0; i < count; ++i)
    visible += static_cast<uint32_t>(index[i]) <= index_limit_ ? 1 : 0;
  if (visible == count) {  // The usual case, in loops without a dependence.
    const auto first = static_cast<size_t>(tile.slots);
    const auto slots = static_cast<size_t>(count);
#pragma GCC unroll 8
    for (size_t i = 0; i < slots; ++i) tile.key[first + i] = key + i * row_bytes_;
#pragma GCC unroll 8
    for (size_t i = 0; i < slots; ++i) tile.value[first + i] = value + i * row_bytes_;
    for (size_t i = 0; i < slots; ++i) tile.index[first + i] = index[i];
    for (size_t i = 0; i < slots; ++i) tile.column[first + i] = column_ + static_cast<int32_t>(i);
    tile.slots += count;
    return;
  }
  if (visible == 0) return;
  for (int i = 0; i < count; ++i) {
    if (static_cast<uint32_t>(index[i]) > index_limit_) continue;
    const auto target = static_cast<size_t>(tile.slots++);
    tile.key[target] = key + static_cast<size_t>(i) * row_bytes_;
    tile.value[target] = value + static_cast<size_t>(i) * row_bytes_;
    tile.index[target] = index[i];
    tile.column[target] = column_ + i;
  }
}

}  // namespace ebbtide::gpu
