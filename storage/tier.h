// SPDX-License-Identifier: Apache-2.0
//
// A Tier keeps block records in one kind of memory. It knows keys and bytes; what a page means, and
// whether it deserves its place, is decided above (service/).
//
// Implementations: host/, rocksdb/. Contract: tests/contract/tier_contract_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"

#include "storage/block_key.h"
#include "storage/block_record.h"

namespace ebbtide::storage {

struct BlockWrite {
  BlockKey key;
  std::span<const std::byte> record;  // A whole block record (block_record.h).
  bool may_begin_segment = true;      // Where no slot made for its size is free.
};

enum class PageState : uint8_t {
  kMissing,  // The tier does not hold the block: a miss is an answer.
  kOk,       // `into` holds the page and its checksum agrees.
  kCorrupt,  // The tier held bytes that fail their check; `into` holds nothing to trust.
};

struct PageRead {
  BlockKey key;
  uint32_t page = 0;  // layer * kv_heads + kv head
  PagePart part = PagePart::kExact;
  std::span<std::byte> into = {};         // Caller's memory, exactly one such part long.
  PageState state = PageState::kMissing;  // Set by Read.
};

// Keeps a block's record readable in place for as long as it lives.
using BlockPin = std::shared_ptr<const std::span<const std::byte>>;

struct TierUsage {
  uint64_t budget_bytes = 0;
  uint64_t used_bytes = 0;  // Everything the tier takes: records, index, head-room, garbage.
  uint64_t blocks = 0;
  uint64_t corrupt_pages = 0;  // Reads that found one; a page counts each time.
};

// What records of one size may take of a tier that holds records of several. Each takes a slot, and
// slots are made by whole segments (docs/glossary.md).
struct SizeRoom {
  uint64_t slots_used = 0;  // Slots that hold a record, or did until now and cannot be used yet.
  uint64_t slots_made = 0;  // Those and the free ones, which no other size can have.
  uint64_t segments_begun = 0;  // So far; those are in slots_made, or failed, or came and went.
  uint64_t segment_slots = 0;   // Slots of a segment that could be made yet.
  uint64_t segment_bytes = 0;   // Bytes of the budget that it takes, everything counted.
};

struct TierRoom {
  uint64_t free_bytes = 0;      // For segments of any size.
  std::vector<SizeRoom> sizes;  // As asked.
};

// Thread-safe. Calls block; the mover (service/movement/) owns the waiting.
class Tier {
 public:
  virtual ~Tier() = default;

  virtual std::string_view name() const = 0;  // "host", "rocksdb"

  // Stores `blocks`, replacing older records of the same key. Each record is stored whole or not at
  // all; when an error is returned, some of a batch may have been stored.
  //   kInvalidArgument     not a block record, or its identity is not the key's
  //   kFailedPrecondition  it may begin no segment, and needs one
  //   kResourceExhausted   the tier is at its budget; demote or evict first
  //   kUnavailable         the medium did not answer, or is full within the budget; the caller may
  //                        retry
  virtual absl::Status Write(std::span<const BlockWrite> blocks) = 0;

  // Fills `into` of every page held, checks it, and sets its `state`. Corrupt pages are counted.
  // A tier that need not wait for its medium (patient_tier.h) waits `patience` at most.
  //   kInvalidArgument    `into` is not one page long, or the page number is past the record's end;
  //                       no `state` may be trusted
  //   kUnavailable        the medium did not answer; no `state` may be trusted
  //   kDeadlineExceeded   the medium did not answer within `patience`; no `state` may be trusted
  virtual absl::Status Read(std::span<PageRead> pages, absl::Duration patience) = 0;

  // The whole record where it can be addressed without a copy, unchecked: the reader checks the
  // pages it uses (block_record.h). Null where the block is not held or the medium is not memory.
  virtual BlockPin Pin(const BlockKey& key) = 0;

  // Forgets `keys`; keys not held are ignored. Pinned bytes go when the last pin does.
  //   kUnavailable  as Write
  virtual absl::Status Erase(std::span<const BlockKey> keys) = 0;

  // Is the medium well? Tries, with a scratch of its own and as far as the budget leaves one, what
  // a write and a read need of it.
  //   kUnavailable  as Write
  virtual absl::Status Probe() = 0;

  virtual TierUsage Usage() const = 0;

  // For records of each of `sizes`, at one moment. If nobody else charges the budget
  // meanwhile, slots_made and free_bytes / segment_bytes * segment_slots of one size fit, and no
  // more.
  virtual TierRoom Room(std::span<const RecordSize> sizes) const = 0;
};

// May `page` be read from a record of `geometry`? For implementations.
//   kInvalidArgument  as Tier::Read
absl::Status CheckRead(const PageRead& page, const RecordGeometry& geometry);

}  // namespace ebbtide::storage
