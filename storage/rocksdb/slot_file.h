// SPDX-License-Identifier: Apache-2.0
//
// Who owns which slot on disk. Slots of one size share segments; a segment is made on need,
// charged while it lives, and deleted when its last slot is free. The fullest segment is filled
// first, so that emptier ones drain. Freed slots are not reused while a reader may still look at
// them.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "storage/byte_budget.h"
#include "storage/rocksdb/file_calls.h"
#include "storage/rocksdb/io_buffer.h"
#include "storage/rocksdb/segment.h"
#include "storage/rocksdb/tier_folder.h"
#include "storage/tier.h"

namespace ebbtide::storage {

// Where a record lies; what the index keeps.
struct SlotPlace {
  uint32_t segment = 0;
  uint32_t slot = 0;
  friend bool operator==(const SlotPlace&, const SlotPlace&) = default;
};

// Thread-safe.
class SlotFiles {
 public:
  struct Options {
    uint64_t segment_bytes_max = 0;  // A record that is longer has a segment of its own.
    FileCalls& calls;
    ByteBudget& budget;
  };

  // While it lives, slots freed after it began keep their bytes.
  class Reading {
   public:
    explicit Reading(SlotFiles& files) : files_(files), epoch_(files.BeginReading()) {}
    ~Reading() { files_.EndReading(epoch_); }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

   private:
    SlotFiles& files_;
    const uint64_t epoch_;
  };

  SlotFiles(const TierFolder& folder, const Options& options)
      : folder_(folder), options_(options) {}

  // A slot of `size`, in a new segment where none has room.
  //   kFailedPrecondition  it may begin no segment, and needs one
  //   kResourceExhausted   a new segment passes the budget
  //   kUnavailable         the disk did not answer, or is full
  absl::StatusOr<SlotPlace> Allocate(const SlotSize& size, bool may_begin_segment = true)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Gives a slot back, at once or when the readers of this moment are done.
  void Free(const SlotPlace& place) ABSL_LOCKS_EXCLUDED(mu_);

  // Nobody knows any more whether the slot is in use: it is no room until it is freed, if ever.
  void Lose(const SlotPlace& place) noexcept ABSL_LOCKS_EXCLUDED(mu_);

  // The segment of an allocated slot; null where there is none of this number.
  std::shared_ptr<Segment> Find(uint32_t segment) const ABSL_LOCKS_EXCLUDED(mu_);

  // As Tier::Room, for records that fill slots of each of `sizes`; one moment's whole picture.
  // A segment that is being made is there, one that is being deleted is not.
  TierRoom Room(std::span<const SlotSize> sizes) const ABSL_LOCKS_EXCLUDED(mu_);

  // Deletes what could not be deleted when it became empty or was not made, and stays charged.
  //   kUnavailable  some is left, and why
  absl::Status DeleteLeftOver() ABSL_LOCKS_EXCLUDED(mu_);

  // Tries what failed: makes a segment of the size that could not be made last, writes and reads a
  // slot of it, and deletes it. Where none failed, or for a minute of probes a second, or where the
  // budget leaves no such segment: a file of 4 KiB, else a slot that is free, if any. Then records
  // that need no more than that find their place again.
  //   kUnavailable  as Allocate, and where it reads other bytes
  absl::Status Probe() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Holding {
    std::shared_ptr<Segment> segment;
    std::vector<bool> is_taken;
    std::vector<bool> is_lost;
    uint32_t free_slots = 0;
  };
  struct WithRoom {  // Orders segments: the fullest first, the oldest of equals.
    uint32_t free_slots;
    uint32_t id;
    friend auto operator<=>(const WithRoom&, const WithRoom&) = default;
  };
  struct SizeClass {
    absl::btree_set<WithRoom> with_room;
    uint64_t slots = 0;
    uint64_t free_slots = 0;
    uint64_t lost_slots = 0;
    uint64_t segments_begun = 0;
    bool is_growing = false;  // A segment is charged and being made.
  };
  struct Freed {
    uint64_t epoch;
    SlotPlace place;
  };
  // Segments that became empty, to be deleted and released once the lock is given back.
  using Emptied = std::vector<std::shared_ptr<Segment>>;

  SegmentShape ShapeFor(const SlotSize& size) const;
  // The entries are charged with the slots, so that a free slot can always be used.
  static uint64_t ChargeBytes(const SegmentShape& shape) {
    return shape.slots * (shape.slot.bytes + shape.slot.entry_bytes);
  }
  uint64_t BeginReading() ABSL_LOCKS_EXCLUDED(mu_);
  void EndReading(uint64_t epoch) ABSL_LOCKS_EXCLUDED(mu_);

  std::optional<SlotPlace> Take(SizeClass& size_class) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Return(const SlotPlace& place, Emptied& emptied) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // A slot that is there; where there is none, charges a segment, numbers it, and leaves it to the
  // caller to make.
  absl::StatusOr<std::optional<SlotPlace>> TakeOrGrow(SegmentShape& shape, bool may_begin_segment)
      ABSL_LOCKS_EXCLUDED(mu_);
  // Of one that could not be made: others may try. What there is of it goes; null where there is
  // nothing.
  void GiveUp(const SegmentShape& shape, std::shared_ptr<Segment> segment) ABSL_LOCKS_EXCLUDED(mu_);
  // Gives back what a segment was charged: now where it has no file, else with its file (Delete).
  void EndCharge(const SegmentShape& shape, bool has_file) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Of a new segment, which is one that is being made no more. Memory that runs out half-way ends
  // the process: half an insertion would lose its slots.
  SlotPlace TakeFirst(const SegmentShape& shape, std::shared_ptr<Segment> segment) noexcept
      ABSL_LOCKS_EXCLUDED(mu_);
  // What can't be deleted is left over, and stays charged. Takes no memory where all goes well.
  void Delete(std::shared_ptr<Segment> segment) ABSL_LOCKS_EXCLUDED(mu_);
  void Delete(Emptied emptied) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status WriteAndRead(Segment& segment, uint32_t slot);
  // Of a charged shape, with a number of its own.
  absl::Status ProbeFile(SegmentShape shape) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status ProbeFreeSlot() ABSL_LOCKS_EXCLUDED(mu_);  // Where there is one.
  std::optional<SlotSize> SizeToProbe() ABSL_LOCKS_EXCLUDED(mu_);
  std::optional<SlotSize> FreeSlotSize() const ABSL_LOCKS_EXCLUDED(mu_);  // Of a slot free now.

  // fixed after construction
  const TierFolder& folder_;
  const Options options_;

  // synchronised by itself
  IoBuffers buffers_;

  // guarded by mu_
  mutable absl::Mutex mu_;
  uint32_t next_segment_ ABSL_GUARDED_BY(mu_) = 1;
  uint64_t next_epoch_ ABSL_GUARDED_BY(mu_) = 1;
  absl::flat_hash_map<uint32_t, Holding> segments_ ABSL_GUARDED_BY(mu_);
  std::map<SlotSize, SizeClass> classes_ ABSL_GUARDED_BY(mu_);
  absl::btree_set<uint64_t> readers_ ABSL_GUARDED_BY(mu_);  // Their epochs.
  std::vector<Freed> freed_ ABSL_GUARDED_BY(mu_);           // In order of epochs.
  std::optional<SlotSize> not_made_ ABSL_GUARDED_BY(mu_);   // Of the last segment that failed,
  int not_made_probes_ ABSL_GUARDED_BY(mu_) = 0;            // and the probes since.
  uint64_t deleting_bytes_ ABSL_GUARDED_BY(mu_) = 0;        // Charged until their files are gone.
  Emptied left_over_ ABSL_GUARDED_BY(mu_);                  // Charged: they could not be deleted,
  std::string left_over_why_ ABSL_GUARDED_BY(mu_);          // the last of them for this.
};

}  // namespace ebbtide::storage
