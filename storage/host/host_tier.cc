// SPDX-License-Identifier: Apache-2.0

#include "storage/host/host_tier.h"

#include <cstring>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "base/executor.h"
#include "base/status_macros.h"

namespace ebbtide::storage {
namespace {

// What the tier keeps for a record outside the arena: its slot in the map while that grows, the
// Record with its control block, the extent maps' nodes, and its registration with a device.
// HostTierTest.OverheadIsCovered and its like measure it.
constexpr uint64_t kRecordOverheadBytes = 512;

}  // namespace

// A record's place in the arena, charged while it lives: in the map, and after that in pins.
class HostTier::Record {
 public:
  Record(std::shared_ptr<ArenaPool> pool, const Extent& extent, const RecordHeader& source_header)
      : pool_(std::move(pool)),
        extent_(extent),
        bytes_(pool_->bytes(extent)),
        header_(source_header) {
    const uint64_t checksums_end = header_.geometry.header_used_bytes();
    header_.part_checksums = bytes_.subspan(checksums_end - header_.part_checksums.size(),
                                            header_.part_checksums.size());
    header_.positions = {};  // Nobody asks this tier for them.
  }
  ~Record() { pool_->Free(extent_, kRecordOverheadBytes); }
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;

  const std::span<const std::byte>& bytes() const { return bytes_; }
  RecordSize size() const { return header_.geometry.size(); }
  const RecordHeader& header() const { return header_; }  // Its checksums lie in the arena.

 private:
  const std::shared_ptr<ArenaPool> pool_;
  const Extent extent_;
  const std::span<const std::byte> bytes_;
  RecordHeader header_;
};

absl::StatusOr<std::unique_ptr<HostTier>> HostTier::Create(ByteBudget& budget) {
  const uint64_t available_bytes = AvailableMemoryBytes();
  if (budget.limit_bytes() > available_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("host tier: budget of ", budget.limit_bytes(),
                                                   " B is more than the ", available_bytes,
                                                   " B this process may use; lower host.budget"));
  }
  EBBTIDE_ASSIGN_OR_RETURN(std::shared_ptr<ArenaPool> pool, ArenaPool::Create(budget));
  return std::unique_ptr<HostTier>(new HostTier(budget, std::move(pool)));
}

absl::Status HostTier::Write(std::span<const BlockWrite> blocks) {
  for (const BlockWrite& block : blocks) EBBTIDE_RETURN_IF_ERROR(WriteOne(block));
  return absl::OkStatus();
}

absl::Status HostTier::WriteOne(const BlockWrite& block) {
  EBBTIDE_ASSIGN_OR_RETURN(const RecordHeader header, CheckRecord(block.key, block.record));
  if (!block.may_begin_segment) {  // Each record is one of its own, and none is made before.
    return absl::FailedPreconditionError("host tier: no extent is free, and none may be taken");
  }
  EBBTIDE_ASSIGN_OR_RETURN(const Extent extent, pool_->Store(block.record, kRecordOverheadBytes));
  absl::Cleanup give_back = [&] { pool_->Free(extent, kRecordOverheadBytes); };
  auto record = std::make_shared<const Record>(pool_, extent, header);
  std::move(give_back).Cancel();  // The record does, at its end.
  {
    absl::MutexLock lock(&mu_);
    Count& count = counts_[header.geometry.size()];
    records_[block.key].swap(record);
    ++count.held;
    ++count.written;
    if (record != nullptr) --counts_[record->size()].held;
  }
  return absl::OkStatus();  // The replaced record goes here, outside the lock.
}

absl::Status HostTier::Read(std::span<PageRead> pages, absl::Duration /*patience*/) {
  for (PageRead& page : pages) EBBTIDE_RETURN_IF_ERROR(ReadOne(page));
  return absl::OkStatus();
}

absl::Status HostTier::ReadOne(PageRead& page) {
  page.state = PageState::kMissing;
  const std::shared_ptr<const Record> record = Find(page.key);
  if (record == nullptr) return absl::OkStatus();
  EBBTIDE_RETURN_IF_ERROR(CheckRead(page, record->header().geometry));
  const RecordGeometry& geometry = record->header().geometry;
  std::memcpy(page.into.data(), record->bytes().data() + geometry.part_offset(page.page, page.part),
              page.into.size());
  // The copy is checked, not the source: what is delivered is what was tested.
  if (PartIsIntact(record->header(), page.page, page.part, page.into)) {
    page.state = PageState::kOk;
  } else {
    page.state = PageState::kCorrupt;
    corrupt_pages_.fetch_add(1, std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

BlockPin HostTier::Pin(const BlockKey& key) {
  std::shared_ptr<const Record> record = Find(key);
  if (record == nullptr) return nullptr;
  const std::span<const std::byte>* bytes = &record->bytes();
  return BlockPin(std::move(record), bytes);
}

absl::Status HostTier::Erase(std::span<const BlockKey> keys) {
  std::vector<std::shared_ptr<const Record>> erased;  // Freed outside the lock.
  erased.reserve(keys.size());
  absl::MutexLock lock(&mu_);
  for (const BlockKey& key : keys) {
    if (const auto found = records_.find(key); found != records_.end()) {
      --counts_[found->second->size()].held;
      erased.push_back(std::move(found->second));
      records_.erase(found);
    }
  }
  return absl::OkStatus();
}

TierUsage HostTier::Usage() const {
  absl::MutexLock lock(&mu_);
  return {.budget_bytes = budget_.limit_bytes(),
          .used_bytes = budget_.used_bytes(),
          .blocks = records_.size(),
          .corrupt_pages = corrupt_pages_.load(std::memory_order_relaxed)};
}

TierRoom HostTier::Room(std::span<const RecordSize> sizes) const {
  absl::MutexLock lock(&mu_);
  TierRoom room{.free_bytes = budget_.free_bytes(), .sizes = {}};
  for (const RecordSize& size : sizes) {
    const auto found = counts_.find(size);
    const Count count = found == counts_.end() ? Count() : found->second;
    room.sizes.push_back({.slots_used = count.held,
                          .slots_made = count.held,
                          .segments_begun = count.written,
                          .segment_slots = 1,
                          .segment_bytes = size.bytes + kRecordOverheadBytes});
  }
  return room;
}

std::shared_ptr<const HostTier::Record> HostTier::Find(const BlockKey& key) const {
  absl::MutexLock lock(&mu_);
  const auto found = records_.find(key);
  return found == records_.end() ? nullptr : found->second;
}

}  // namespace ebbtide::storage
