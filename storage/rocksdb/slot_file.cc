// SPDX-License-Identifier: Apache-2.0

#include "storage/rocksdb/slot_file.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "base/status_macros.h"

namespace ebbtide::storage {

absl::StatusOr<SlotPlace> SlotFiles::Allocate(const SlotSize& size, bool may_begin_segment) {
  SegmentShape shape = ShapeFor(size);
  EBBTIDE_ASSIGN_OR_RETURN(const std::optional<SlotPlace> place,
                           TakeOrGrow(shape, may_begin_segment));
  if (place) return *place;
  std::shared_ptr<Segment> segment;
  absl::Cleanup give_up = [&] { GiveUp(shape, std::move(segment)); };
  EBBTIDE_ASSIGN_OR_RETURN(segment, Segment::Create(folder_, shape, options_.calls, buffers_));
  EBBTIDE_RETURN_IF_ERROR(segment->TakeRoom());
  std::move(give_up).Cancel();  // Charged until it is deleted.
  return TakeFirst(shape, std::move(segment));
}

absl::StatusOr<std::optional<SlotPlace>> SlotFiles::TakeOrGrow(SegmentShape& shape,
                                                               bool may_begin_segment) {
  absl::MutexLock lock(&mu_);
  SizeClass& size_class = classes_[shape.slot];
  // One segment at a time: two made for two waiting records would both stay half empty.
  const auto can_go_on = [](SizeClass* c) { return !c->is_growing || !c->with_room.empty(); };
  const auto are_deleted = [](uint64_t* bytes) { return *bytes == 0; };
  for (;;) {
    mu_.Await(absl::Condition(+can_go_on, &size_class));
    if (const auto place = Take(size_class)) return place;
    if (!may_begin_segment) {
      return absl::FailedPreconditionError(
          absl::StrCat("rocksdb tier: no slot of ", shape.slot.bytes,
                       " B is free, and no slot file may be begun"));
    }
    if (options_.budget.TryCharge(ChargeBytes(shape))) break;
    if (deleting_bytes_ == 0) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "rocksdb tier: a slot file of ", ChargeBytes(shape),
          " B with its index entries is over budget, ", options_.budget.free_bytes(), " B of ",
          options_.budget.limit_bytes(), " B free; evict first, or raise rocksdb.budget"));
    }
    mu_.Await(absl::Condition(+are_deleted, &deleting_bytes_));  // Theirs may be enough.
  }
  size_class.is_growing = true;
  ++size_class.segments_begun;
  shape.id = next_segment_++;
  return std::optional<SlotPlace>();
}

void SlotFiles::GiveUp(const SegmentShape& shape, std::shared_ptr<Segment> segment) {
  {
    absl::MutexLock lock(&mu_);
    classes_.find(shape.slot)->second.is_growing = false;
    not_made_ = shape.slot;
    not_made_probes_ = 0;
    EndCharge(shape, segment != nullptr);
  }
  if (segment != nullptr) Delete(std::move(segment));
}

void SlotFiles::EndCharge(const SegmentShape& shape, bool has_file) {
  if (has_file) {
    deleting_bytes_ += ChargeBytes(shape);
  } else {
    options_.budget.Release(ChargeBytes(shape));
  }
}

SlotPlace SlotFiles::TakeFirst(const SegmentShape& shape,
                               std::shared_ptr<Segment> segment) noexcept {
  absl::MutexLock lock(&mu_);
  SizeClass& size_class = classes_.find(shape.slot)->second;
  segments_[shape.id] = {.segment = std::move(segment),
                         .is_taken = std::vector<bool>(shape.slots),
                         .is_lost = std::vector<bool>(shape.slots),
                         .free_slots = shape.slots};
  size_class.with_room.insert({.free_slots = shape.slots, .id = shape.id});
  size_class.slots += shape.slots;
  size_class.free_slots += shape.slots;
  size_class.is_growing = false;
  if (not_made_ == shape.slot) not_made_.reset();
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

void SlotFiles::Lose(const SlotPlace& place) noexcept {
  absl::MutexLock lock(&mu_);
  Holding& holding = segments_.find(place.segment)->second;
  holding.is_lost[place.slot] = true;
  ++classes_.find(holding.segment->shape().slot)->second.lost_slots;
}

std::shared_ptr<Segment> SlotFiles::Find(uint32_t segment) const {
  absl::MutexLock lock(&mu_);
  const auto found = segments_.find(segment);
  return found == segments_.end() ? nullptr : found->second.segment;
}

SegmentShape SlotFiles::ShapeFor(const SlotSize& size) const {
  const uint64_t slots = std::max<uint64_t>(options_.segment_bytes_max / size.bytes, 1);
  return {.slot = size, .slots = static_cast<uint32_t>(slots)};
}

TierRoom SlotFiles::Room(std::span<const SlotSize> sizes) const {
  absl::MutexLock lock(&mu_);
  TierRoom room{.free_bytes = options_.budget.free_bytes() + deleting_bytes_, .sizes = {}};
  for (const SlotSize& slot : sizes) {
    const SegmentShape shape = ShapeFor(slot);
    SizeRoom& size = room.sizes.emplace_back(
        SizeRoom{.segment_slots = shape.slots, .segment_bytes = ChargeBytes(shape)});
    const auto found = classes_.find(slot);
    if (found == classes_.end()) continue;
    const SizeClass& size_class = found->second;
    const uint64_t slots = size_class.slots - size_class.lost_slots;
    size.slots_used = slots - size_class.free_slots;
    size.slots_made = slots + (size_class.is_growing ? shape.slots : 0);
    size.segments_begun = size_class.segments_begun;
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
  SizeClass& size_class = classes_.find(shape.slot)->second;
  size_class.with_room.erase({.free_slots = holding.free_slots, .id = place.segment});
  holding.is_taken[place.slot] = false;
  if (holding.is_lost[place.slot]) --size_class.lost_slots;
  holding.is_lost[place.slot] = false;
  ++holding.free_slots;
  ++size_class.free_slots;
  if (holding.free_slots < shape.slots) {
    size_class.with_room.insert({.free_slots = holding.free_slots, .id = place.segment});
    return;
  }
  size_class.slots -= shape.slots;
  size_class.free_slots -= shape.slots;
  EndCharge(shape, /*has_file=*/true);
  emptied.push_back(std::move(holding.segment));
  segments_.erase(found);
}

void SlotFiles::Delete(std::shared_ptr<Segment> segment) {
  const uint64_t charge_bytes = ChargeBytes(segment->shape());
  const absl::Status deleted = segment->Delete();  // No reader looks at it any more.
  absl::MutexLock lock(&mu_);
  deleting_bytes_ -= charge_bytes;
  if (deleted.ok()) {
    options_.budget.Release(charge_bytes);
  } else {
    left_over_why_ = std::string(deleted.message());
    left_over_.push_back(std::move(segment));
  }
}

void SlotFiles::Delete(Emptied emptied) {
  for (std::shared_ptr<Segment>& segment : emptied) Delete(std::move(segment));
}

absl::Status SlotFiles::DeleteLeftOver() {
  Emptied again;
  {
    absl::MutexLock lock(&mu_);
    std::swap(again, left_over_);
    for (const auto& segment : again) deleting_bytes_ += ChargeBytes(segment->shape());
  }
  Delete(std::move(again));
  absl::MutexLock lock(&mu_);
  if (left_over_.empty()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(left_over_why_, "; ", left_over_.size(),
                                             " slot files that nothing is in stay on the disk"));
}

absl::Status SlotFiles::Probe() {
  EBBTIDE_RETURN_IF_ERROR(DeleteLeftOver());
  if (const std::optional<SlotSize> size = SizeToProbe()) {
    const SegmentShape shape = ShapeFor(*size);
    if (options_.budget.TryCharge(ChargeBytes(shape))) return ProbeFile(shape);
  }
  constexpr SegmentShape kLeast = {.slot = {.bytes = kRecordAlignment}, .slots = 1};
  if (options_.budget.TryCharge(ChargeBytes(kLeast))) {
    absl::Status status = ProbeFile(kLeast);
    if (status.ok() || !FreeSlotSize()) return status;
  }
  return ProbeFreeSlot();
}

absl::Status SlotFiles::ProbeFreeSlot() {
  const std::optional<SlotSize> free = FreeSlotSize();
  if (!free) return absl::OkStatus();
  const absl::StatusOr<SlotPlace> place = Allocate(*free, /*may_begin_segment=*/false);
  if (absl::IsFailedPrecondition(place.status())) return absl::OkStatus();
  EBBTIDE_RETURN_IF_ERROR(place.status());
  const absl::Status status = WriteAndRead(*Find(place->segment), place->slot);
  Free(*place);
  EBBTIDE_RETURN_IF_ERROR(status);
  return DeleteLeftOver();
}

absl::Status SlotFiles::ProbeFile(SegmentShape shape) {
  {
    std::shared_ptr<Segment> segment;
    const absl::Cleanup delete_it = [&] {
      {
        absl::MutexLock lock(&mu_);
        EndCharge(shape, segment != nullptr);
      }
      if (segment != nullptr) Delete(std::move(segment));
    };
    {
      absl::MutexLock lock(&mu_);
      shape.id = next_segment_++;
    }
    EBBTIDE_ASSIGN_OR_RETURN(segment, Segment::Create(folder_, shape, options_.calls, buffers_));
    EBBTIDE_RETURN_IF_ERROR(segment->TakeRoom());
    EBBTIDE_RETURN_IF_ERROR(WriteAndRead(*segment, 0));
    absl::MutexLock lock(&mu_);
    if (not_made_ == shape.slot) not_made_.reset();
  }
  return DeleteLeftOver();
}

std::optional<SlotSize> SlotFiles::SizeToProbe() {
  constexpr int kProbesMax = 60;  // A minute.
  absl::MutexLock lock(&mu_);
  if (not_made_.has_value() && ++not_made_probes_ > kProbesMax) not_made_.reset();
  return not_made_;
}

std::optional<SlotSize> SlotFiles::FreeSlotSize() const {
  absl::MutexLock lock(&mu_);
  for (const auto& [size, size_class] : classes_) {
    if (size_class.free_slots > 0) return size;
  }
  return std::nullopt;
}

absl::Status SlotFiles::WriteAndRead(Segment& segment, uint32_t slot) {
  const uint64_t bytes = segment.shape().slot.bytes;
  const IoBuffers::Buffer written = buffers_.Lend(bytes);
  const IoBuffers::Buffer read = buffers_.Lend(bytes);
  std::ranges::fill(written.bytes(), std::byte{0x5A});
  std::ranges::fill(read.bytes(), std::byte{0});
  EBBTIDE_RETURN_IF_ERROR(segment.Write(slot, written.bytes().first(bytes)));
  EBBTIDE_RETURN_IF_ERROR(segment.Read(slot, 0, read.bytes().first(bytes)).status());
  if (std::ranges::equal(read.bytes().first(bytes), written.bytes().first(bytes)))
    return absl::OkStatus();
  return absl::UnavailableError("rocksdb tier: the disk does not read what was written");
}

}  // namespace ebbtide::storage
