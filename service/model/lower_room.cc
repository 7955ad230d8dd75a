// SPDX-License-Identifier: Apache-2.0

#include "service/model/lower_room.h"

#include <algorithm>
#include <vector>

#include "base/status_macros.h"

namespace ebbtide::service {
namespace {

// Records of one size that have no slot below yet.
struct WithoutSlot {
  uint64_t records = 0;
  uint64_t host_cost_bytes = 1;
  uint64_t segment_slots = 0;
  uint64_t segment_bytes = 0;

  uint64_t SegmentsFor(uint64_t lacking) const {
    if (lacking == 0) return 0;
    return segment_slots == 0 ? UINT64_MAX : (lacking + segment_slots - 1) / segment_slots;
  }
  uint64_t SegmentsIn(uint64_t below_bytes) const {
    return segment_slots == 0 ? 0 : below_bytes / segment_bytes;
  }
  // Host bytes that a byte of a segment spares at most.
  double spared_bytes() const {
    return segment_slots == 0
               ? 0
               : static_cast<double>(segment_slots) * static_cast<double>(host_cost_bytes) /
                     static_cast<double>(segment_bytes);
  }
};

// Tries numbers of segments, size after size.
class Placing {
 public:
  explicit Placing(std::vector<WithoutSlot> sizes)
      : sizes_(std::move(sizes)), rest_(sizes_.size()) {
    Rest rest;
    for (size_t i = sizes_.size(); i-- > 0;) {
      rest.host_bytes += sizes_[i].records * sizes_[i].host_cost_bytes;
      rest.spared_bytes = std::max(rest.spared_bytes, sizes_[i].spared_bytes());
      rest_[i] = rest;
    }
  }

  // Do the sizes from `first` on find a place?
  bool Fits(size_t first, uint64_t host_bytes, uint64_t below_bytes) {
    if (first == sizes_.size() || rest_[first].host_bytes <= host_bytes) return true;
    const double lacking_bytes = static_cast<double>(rest_[first].host_bytes - host_bytes);
    const double spared_bytes = rest_[first].spared_bytes * static_cast<double>(below_bytes);
    if (lacking_bytes > spared_bytes * (1 + 1e-9) || tries_left_ == 0) return false;
    --tries_left_;
    const WithoutSlot& size = sizes_[first];
    const uint64_t in_host = std::min(size.records, host_bytes / size.host_cost_bytes);
    const uint64_t least = size.SegmentsFor(size.records - in_host);
    const uint64_t most = std::min(size.SegmentsFor(size.records), size.SegmentsIn(below_bytes));
    for (uint64_t segments = most + 1; segments-- > least;) {
      const uint64_t below = std::min(size.records, segments * size.segment_slots);
      if (Fits(first + 1, host_bytes - (size.records - below) * size.host_cost_bytes,
               below_bytes - segments * size.segment_bytes)) {
        return true;
      }
    }
    return false;
  }

 private:
  struct Rest {
    uint64_t host_bytes = 0;  // Of all of them in the host.
    double spared_bytes = 0;  // The most of any.
  };

  const std::vector<WithoutSlot> sizes_;
  std::vector<Rest> rest_;  // Of the sizes from each on.
  // Some hundred microseconds. A few hundred tries settle two sizes, whatever they are.
  uint32_t tries_left_ = 1 << 16;
};

}  // namespace

void LowerRoom::FreezeBelow(const PromisedRecords& held) {
  below_bytes = 0;
  for (auto& [size, room] : sizes) {
    const auto found = held.find(size);
    room.slots_made = found == held.end() ? 0 : found->second;
  }
}

bool LowerRoom::TakeSegment(const storage::RecordSize& size) {
  Size& room = sizes.at(size);
  if (room.segment_slots == 0 || room.segment_bytes > below_bytes) return false;
  below_bytes -= room.segment_bytes;
  room.slots_made += room.segment_slots;
  return true;
}

bool LowerRoom::Fits(const PromisedRecords& promised, uint64_t metadata_bytes) const {
  std::vector<WithoutSlot> without_slot;
  for (const auto& [size, records] : promised) {
    const auto found = sizes.find(size);
    EBBTIDE_CHECK(found != sizes.end(), "the room was looked at for every size");
    const Size& room = found->second;
    if (records <= room.slots_made) continue;
    without_slot.push_back({.records = records - room.slots_made,
                            .host_cost_bytes = room.host_cost_bytes,
                            .segment_slots = room.segment_slots,
                            .segment_bytes = room.segment_bytes});
  }
  return Placing(std::move(without_slot))
      .Fits(0, host_bytes - std::min(host_bytes, metadata_bytes), below_bytes);
}

uint64_t LowerRoom::RecordsLeft(const storage::RecordSize& size, const PromisedRecords& promised,
                                uint64_t metadata_bytes) const {
  const auto fit = [&](uint64_t records) {
    PromisedRecords all = promised;
    all[size] += records;
    return Fits(all, metadata_bytes);
  };
  if (!fit(0)) return 0;
  uint64_t fitting = 0;
  uint64_t step = 1;
  while (fit(fitting + step)) {
    fitting += step;
    step *= 2;
  }
  for (; step > 0; step /= 2) {
    if (fit(fitting + step)) fitting += step;
  }
  return fitting;
}

}  // namespace ebbtide::service
