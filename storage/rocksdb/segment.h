// SPDX-License-Identifier: Apache-2.0
//
// One slot file: a run of slots of one size, taken from the disk before it is used, so that a
// write into it never finds the disk full. It moves bytes; who owns a slot is slot_file.h's
// business.

#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "storage/rocksdb/file_calls.h"
#include "storage/rocksdb/io_buffer.h"
#include "storage/rocksdb/tier_folder.h"

namespace ebbtide::storage {

struct SlotSize {
  uint64_t bytes = 0;        // A multiple of 4096.
  uint64_t entry_bytes = 0;  // Charged beside them, for the index entry of what fills the slot.
  friend auto operator<=>(const SlotSize&, const SlotSize&) = default;
};

struct SegmentShape {
  uint32_t id = 0;
  SlotSize slot;
  uint32_t slots = 0;
  uint64_t bytes() const { return slot.bytes * slots; }
};

// Thread-safe for slots that do not overlap.
class Segment {
 public:
  // A file that takes nothing of the disk yet. `folder`, `calls` and `buffers` outlive it.
  //   kUnavailable  the file cannot be made
  static absl::StatusOr<std::shared_ptr<Segment>> Create(const TierFolder& folder,
                                                         const SegmentShape& shape,
                                                         FileCalls& calls, IoBuffers& buffers);
  ~Segment();  // Deletes the file, where that was not done.
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  const SegmentShape& shape() const { return shape_; }

  // Once, before anything is written.
  //   kUnavailable  the disk has no room, or did not answer; some may be taken
  absl::Status TakeRoom();

  // Deletes the file, when nobody writes or reads it any more. May be tried again.
  //   kUnavailable  the disk did not let it, or the folder is away or ours no more
  absl::Status Delete();

  // Fills slot `slot` with `record`, as long as a slot. Straight from the caller's memory where
  // that lies on 4 KiB.
  //   kUnavailable  the disk did not take it; the slot holds garbage
  absl::Status Write(uint32_t slot, std::span<const std::byte> record);

  // Reads from `offset` of slot `slot`; offset, length and memory are multiples of 4096. The number
  // of bytes read: fewer where the file was cut behind our back.
  //   kUnavailable  the disk did not answer
  absl::StatusOr<uint64_t> Read(uint32_t slot, uint64_t offset, std::span<std::byte> into) const;

 private:
  Segment(const TierFolder& folder, std::string path, int fd, const SegmentShape& shape,
          FileCalls& calls, IoBuffers& buffers);

  absl::Status WriteAligned(uint64_t offset, std::span<const std::byte> bytes);
  absl::Status Error(const char* call, uint64_t offset) const;  // From errno.

  // fixed after construction
  const TierFolder& folder_;
  const std::string path_;
  const int fd_;
  const SegmentShape shape_;
  const bool is_direct_;
  FileCalls& calls_;
  IoBuffers& buffers_;

  bool is_deleted_ = false;  // Of who deletes.
};

}  // namespace ebbtide::storage
