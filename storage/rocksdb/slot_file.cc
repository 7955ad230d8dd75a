// SPDX-License-Identifier: Apache-2.0

#include "storage/rocksdb/slot_file.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "base/status_macros.h"

namespace ebbtide::storage {

absl::StatusOr<SlotPlace> SlotFiles::Allocate(uint64_t slot_bytes) {
  SegmentShape shape = {.slot_bytes = slot_bytes, .slots = SlotsPerSegment(slot_bytes)};
  {
    absl::MutexLock lock(&mu_);
    SizeClass& size_class = classes_[slot_bytes];
    // One segment at a time: two made for two waiting records would both stay half empty.
    const auto can_go_on = [](SizeClass* c) { return !c->is_growing || !c->with_room.empty(); };
    mu_.Await(absl::Condition(+can_go_on, &size_class));
    if (const auto place = Take(size_class)) return *place;
    size_class.is_growing = true;
    shape.id = next_segment_++;
  }
  // However this ends, others may try.
  const absl::Cleanup has_tried = [&] {
    absl::MutexLock lock(&mu_);
    classes_.find(slot_bytes)->second.is_growing = false;
  };
  const uint64_t charge_bytes = ChargeBytes(shape);
  std::optional<ByteCharge> charge = ByteCharge::Try(options_.budget, charge_bytes);
  if (!charge) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "rocksdb tier: a slot file of ", charge_bytes, " B with its index entries is over budget, ",
        options_.budget.free_bytes(), " B of ", options_.budget.limit_bytes(),
        " B free; evict first, or raise rocksdb.budget"));
  }
  EBBTIDE_ASSIGN_OR_RETURN(std::shared_ptr<Segment> segment,
                           Segment::Create(folder_, shape, options_.calls, buffers_));
  charge->KeepAll();  // Until it is deleted.
  return TakeFirst(shape, std::move(segment));
}

SlotPlace SlotFiles::TakeFirst(const SegmentShape& shape,
                               std::shared_ptr<Segment> segment) noexcept {
  absl::MutexLock lock(&mu_);
  SizeClass& size_class = classes_.find(shape.slot_bytes)->second;
  segments_[shape.id] = {.segment = std::move(segment),
                         .is_taken = std::vector<bool>(shape.slots),
                         .free_slots = shape.slots};
  size_class.with_room.insert({.free_slots = shape.slots, .id = shape.id});
  size_class.slots += shape.slots;
  size_class.free_slots += shape.slots;
  return *Take(size_class);
}

void SlotFiles::Free(const SlotPlace& place) {
  Emptied emptied;
  {
    absl::MutexLock lock(&mu_);
    if (readers_.empty()) {
      Return(place, emptied);
    } else {
      freed_.push_back({.epoch = next_epoch_++, .place = place});
    }
  }
  Delete(std::move(emptied));
}

std::shared_ptr<Segment> SlotFiles::Find(uint32_t segment) const {
  absl::MutexLock lock(&mu_);
  const auto found = segments_.find(segment);
  return found == segments_.end() ? nullptr : found->second.segment;
}

uint32_t SlotFiles::SlotsPerSegment(uint64_t slot_bytes) const {
  return static_cast<uint32_t>(std::max<uint64_t>(options_.segment_bytes_max / slot_bytes, 1));
}

SizeRoom SlotFiles::Room(uint64_t slot_bytes) const {
  SegmentShape shape = {.slot_bytes = slot_bytes, .slots = SlotsPerSegment(slot_bytes)};
  SizeRoom room{.run_records = shape.slots, .run_bytes = ChargeBytes(shape)};
  absl::MutexLock lock(&mu_);
  if (const auto found = classes_.find(slot_bytes); found != classes_.end()) {
    room.held = found->second.slots - found->second.free_slots;
    room.kept = found->second.slots;
  }
  return room;
}

uint64_t SlotFiles::BeginReading() {
  absl::MutexLock lock(&mu_);
  readers_.insert(next_epoch_);
  return next_epoch_++;
}

void SlotFiles::EndReading(uint64_t epoch) {
  Emptied emptied;
  {
    absl::MutexLock lock(&mu_);
    readers_.erase(epoch);
    // A slot freed before the oldest reader began cannot be in what any reader looked up.
    const uint64_t oldest = readers_.empty() ? next_epoch_ : *readers_.begin();
    const auto kept = std::find_if(freed_.begin(), freed_.end(),
                                   [=](const Freed& freed) { return freed.epoch > oldest; });
    for (auto it = freed_.begin(); it != kept; ++it) Return(it->place, emptied);
    freed_.erase(freed_.begin(), kept);
  }
  Delete(std::move(emptied));
}

std::optional<SlotPlace> SlotFiles::Take(SizeClass& size_class) {
  if (size_class.with_room.empty()) return std::nullopt;
  const WithRoom fullest = *size_class.with_room.begin();
  size_class.with_room.erase(size_class.with_room.begin());
  Holding& holding = segments_.find(fullest.id)->second;
  const auto free = std::find(holding.is_taken.begin(), holding.is_taken.end(), false);
  *free = true;
  --holding.free_slots;
  --size_class.free_slots;
  if (holding.free_slots > 0) {
    size_class.with_room.insert({.free_slots = holding.free_slots, .id = fullest.id});
  }
  return SlotPlace{.segment = fullest.id,
                   .slot = static_cast<uint32_t>(free - holding.is_taken.begin())};
}

void SlotFiles::Return(const SlotPlace& place, Emptied& emptied) {
  const auto found = segments_.find(place.segment);
  EBBTIDE_CHECK(found != segments_.end() && found->second.is_taken[place.slot],
                "a slot is freed once");
  Holding& holding = found->second;
  const SegmentShape& shape = holding.segment->shape();
  SizeClass& size_class = classes_.find(shape.slot_bytes)->second;
  size_class.with_room.erase({.free_slots = holding.free_slots, .id = place.segment});
  holding.is_taken[place.slot] = false;
  ++holding.free_slots;
  ++size_class.free_slots;
  if (holding.free_slots < shape.slots) {
    size_class.with_room.insert({.free_slots = holding.free_slots, .id = place.segment});
    return;
  }
  size_class.slots -= shape.slots;
  size_class.free_slots -= shape.slots;
  emptied.push_back(std::move(holding.segment));
  segments_.erase(found);
}

void SlotFiles::Delete(Emptied emptied) {
  for (std::shared_ptr<Segment>& segment : emptied) {
    const uint64_t charge_bytes = ChargeBytes(segment->shape());
    segment.reset();  // No reader holds it any more: the file goes here, then its charge.
    options_.budget.Release(charge_bytes);
  }
}

}  // namespace ebbtide::storage
