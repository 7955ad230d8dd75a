// SPDX-License-Identifier: Apache-2.0
//
// Block records on disk: payloads in slot files, RocksDB as the index that decides what is held.
// Payload first, entry after; each page is read alone and checked against the entry. Starts empty.
// Why so: docs/decisions/0003-slot-files.md. Contract: tests/contract/tier_contract_test.cc.

#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "base/executor.h"
#include "storage/block_record.h"
#include "storage/byte_budget.h"
#include "storage/rocksdb/block_index.h"
#include "storage/rocksdb/file_calls.h"
#include "storage/rocksdb/io_buffer.h"
#include "storage/rocksdb/page_runs.h"
#include "storage/rocksdb/slot_file.h"
#include "storage/rocksdb/tier_folder.h"
#include "storage/tier.h"

namespace ebbtide::storage {

struct RocksdbTierOptions {
  std::filesystem::path folder;
  uint64_t budget_bytes = 0;    // Of disk: slot files, index, logs and head-room.
  ParallelFor* io = nullptr;    // Reads of a batch run side by side on it; null: one after another.
  FileCalls* calls = nullptr;   // Null: the kernel's.
  rocksdb::Env* env = nullptr;  // Null: RocksDB's default.
};

// Thread-safe. Disk use falls when slot files empty; until then their free slots serve records of
// the same size.
class RocksdbTier final : public Tier {
 public:
  // Takes the folder and deletes what an earlier run left in it.
  //   kInvalidArgument     the budget is less than the index's head-room
  //   kFailedPrecondition  the folder is another process's, or holds files of others
  //   kUnavailable         the disk did not answer
  static absl::StatusOr<std::unique_ptr<RocksdbTier>> Create(const RocksdbTierOptions& options);
  ~RocksdbTier() override;  // Deletes the slot files: nothing is read from them again.

  std::string_view name() const override { return "rocksdb"; }
  absl::Status Write(std::span<const BlockWrite> blocks) override;
  absl::Status Read(std::span<PageRead> pages, absl::Duration patience) override;
  BlockPin Pin(const BlockKey& key) override;  // Always null.
  absl::Status Erase(std::span<const BlockKey> keys) override;
  absl::Status Probe() override;
  TierUsage Usage() const override;
  TierRoom Room(std::span<const RecordSize> sizes) const override;

  const TierFolder& folder() const { return *folder_; }

 private:
  struct Block;
  struct ReadJob;

  RocksdbTier(const RocksdbTierOptions& options, std::unique_ptr<TierFolder> folder,
              std::unique_ptr<BlockIndex> index);

  absl::Status WriteOne(const BlockWrite& block) ABSL_LOCKS_EXCLUDED(commit_mu_);
  absl::Status Commit(const BlockKey& key, const SlotPlace& place,
                      std::span<const std::byte> header_used) ABSL_LOCKS_EXCLUDED(commit_mu_);
  absl::Status EraseOne(const BlockKey& key) ABSL_LOCKS_EXCLUDED(commit_mu_);
  // Takes the index back to work after a fault, in a folder that is ours.
  absl::Status HealIndex();
  void NoteDamage(const absl::Status& entry);
  absl::Status Noted(absl::Status status);  // Remembers that the index has to be healed.

  // Fills `block` from its index entry; false where the entry contradicts the key or itself.
  bool Describe(const BlockKey& key, BlockEntry entry, Block& block) const;
  // Finds the block of pages[order[0]] … and adds what has to be read of it.
  absl::Status PlanBlock(std::span<PageRead> pages, std::span<const size_t> order,
                         std::vector<ReadJob>& jobs);
  absl::Status RunJob(const ReadJob& job);
  void MarkCorrupt(PageRead& page);

  // fixed after construction
  ParallelFor* const io_;
  const std::unique_ptr<TierFolder> folder_;

  // synchronised by itself
  ByteBudget budget_;
  IoBuffers buffers_;
  SlotFiles slots_;
  const std::unique_ptr<BlockIndex> index_;
  std::atomic<uint64_t> blocks_ = 0;
  std::atomic<uint64_t> corrupt_pages_ = 0;
  std::atomic<bool> has_told_damage_ = false;
  std::atomic<bool> has_index_failed_ = false;

  // Orders the changes of an entry with what it replaces. The index's log is written under it:
  // some 10 us, and RocksDB would queue its writers anyway.
  absl::Mutex commit_mu_;
};

}  // namespace ebbtide::storage
