// SPDX-License-Identifier: Apache-2.0
//
// What open sequences are promised below the device, and whether there is room for it. The room is
// looked at under the cache's lock: nothing is promised in between.

#include <set>
#include <vector>

#include "absl/strings/str_cat.h"

#include "base/status_macros.h"
#include "service/cache.h"
#include "service/reason.h"

namespace ebbtide::service {

LowerRoom Cache::RoomBeside(const storage::RecordSize& size) const {
  std::set<storage::RecordSize> sizes = {size};
  for (const auto& [promised, records] : promised_) sizes.insert(promised);
  if (growth_) sizes.insert(growth_->size);
  LowerRoom room = options_.look_at_room(std::vector(sizes.begin(), sizes.end()));
  if (!room.below_why.empty()) room.FreezeBelow(HeldBelow());
  if (growth_ && room.sizes.at(growth_->size).segments_begun == growth_->segments_before) {
    room.TakeSegment(growth_->size);  // It is still to come.
  }
  return room;
}

PromisedRecords Cache::HeldBelow() const {
  PromisedRecords held;
  for (const auto& [name, sequence] : sequences_) {
    held[sequence->facts.model->record_size()] +=
        static_cast<uint64_t>(sequence->facts.blocks_below);
  }
  return held;
}

bool Cache::BeginSegment(const storage::RecordSize& size) {
  const absl::MutexLock lock(&mu_);
  const auto nobody_does = [](std::optional<Growth>* growth) { return !growth->has_value(); };
  mu_.Await(absl::Condition(+nobody_does, &growth_));
  LowerRoom room = RoomBeside(size);
  const Growth growth = {.size = size, .segments_before = room.sizes.at(size).segments_begun};
  // Where not all that is promised has a place any more, whoever comes first takes his.
  const bool fits = room.Fits(promised_, metadata_bytes_);
  if (!room.TakeSegment(size)) return false;
  if (fits && !room.Fits(promised_, metadata_bytes_)) return false;
  growth_ = growth;
  return true;
}

void Cache::EndSegment() noexcept {
  const absl::MutexLock lock(&mu_);
  growth_.reset();
}

absl::Status Cache::CheckPromises(std::string_view name, const Opening& opening) const {
  const storage::RecordSize size = opening.model->record_size();
  LowerRoom room = RoomBeside(size);
  if (room.Fits(promised_, metadata_bytes_ + opening.metadata_bytes)) return absl::OkStatus();
  return Refuse(
      absl::StatusCode::kResourceExhausted, "LOWER_TIERS_FULL",
      absl::StrCat("sequence \"", std::string(name), "\" would keep ", opening.metadata_bytes,
                   " B for lanes, digests and score state in the host tier, which blocks of open ",
                   "sequences need: with ", metadata_bytes_, " B of such there is room for ",
                   room.RecordsLeft(size, promised_, metadata_bytes_), " more of ", size.bytes,
                   " B; close sequences, or raise the host or rocksdb budget"));
}

absl::Status Cache::CheckRoom(const Sequence& facts, const Need& need) const {
  const storage::RecordSize size = facts.model->record_size();
  LowerRoom room = RoomBeside(size);
  const uint64_t metadata_bytes = metadata_bytes_ + need.metadata_bytes;
  PromisedRecords promised = promised_;
  promised[size] += static_cast<uint64_t>(need.blocks);
  if (room.Fits(promised, metadata_bytes)) return absl::OkStatus();
  return Refuse(absl::StatusCode::kResourceExhausted, "LOWER_TIERS_FULL",
                absl::StrCat("sequence \"", facts.args.sequence, "\": ", need.blocks,
                             need.blocks == 1 ? " more block of " : " more blocks of ", size.bytes,
                             need.blocks == 1 ? " B needs" : " B need",
                             " a place below the device, where there is room for ",
                             room.RecordsLeft(size, promised_, metadata_bytes),
                             "; close sequences, or raise the host or rocksdb budget",
                             room.below_why.empty() ? "" : "; the tier below takes none now: ",
                             room.below_why));
}

void Cache::GiveUpPromise(const Model& model, uint64_t records) {
  if (records == 0) return;
  const auto promise = promised_.find(model.record_size());
  EBBTIDE_CHECK(promise != promised_.end() && promise->second >= records,
                "no more is given up than was promised");
  promise->second -= records;
  if (promise->second == 0) promised_.erase(promise);
}

}  // namespace ebbtide::service
