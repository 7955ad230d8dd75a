// SPDX-License-Identifier: Apache-2.0
//
// Block records in host memory, readable in place. A map from key to record behind one lock; bytes
// are copied outside it. Contract: tests/contract/tier_contract_test.cc.

#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "storage/block_record.h"
#include "storage/byte_budget.h"
#include "storage/host/arena_pool.h"
#include "storage/tier.h"

namespace ebbtide::storage {

// Thread-safe. Pins may outlive the tier; the budget outlives both.
class HostTier final : public Tier {
 public:
  // The tier keeps to `budget` together with everybody else who charges it: digests, staging and
  // whatever else lives in host memory.
  //   kInvalidArgument    the limit is more than this process may use
  //   kResourceExhausted  no address space
  static absl::StatusOr<std::unique_ptr<HostTier>> Create(ByteBudget& budget);

  // For a device that reads in place: has what takes memory within `reachable` registered with it
  // from now on. Once, before anything is written.
  std::span<const std::byte> reachable() const { return pool_->reachable(); }
  void RegisterWith(ArenaPool::RegisterMemory registers) {
    pool_->RegisterWith(std::move(registers));
  }

  std::string_view name() const override { return "host"; }
  absl::Status Write(std::span<const BlockWrite> blocks) override;
  absl::Status Read(std::span<PageRead> pages, absl::Duration patience) override;
  BlockPin Pin(const BlockKey& key) override;
  absl::Status Erase(std::span<const BlockKey> keys) override;
  absl::Status Probe() override { return absl::OkStatus(); }  // Memory does not fail so.
  TierUsage Usage() const override;
  TierRoom Room(std::span<const RecordSize> sizes) const override;

 private:
  class Record;

  explicit HostTier(ByteBudget& budget, std::shared_ptr<ArenaPool> pool)
      : budget_(budget), pool_(std::move(pool)) {}

  absl::Status WriteOne(const BlockWrite& block) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status ReadOne(PageRead& page) ABSL_LOCKS_EXCLUDED(mu_);
  std::shared_ptr<const Record> Find(const BlockKey& key) const ABSL_LOCKS_EXCLUDED(mu_);

  // fixed after construction
  ByteBudget& budget_;
  const std::shared_ptr<ArenaPool> pool_;  // Shared with the records that pins keep alive.

  // guarded by mu_
  mutable absl::Mutex mu_;
  absl::flat_hash_map<BlockKey, std::shared_ptr<const Record>> records_ ABSL_GUARDED_BY(mu_);
  // Of records of one size: those held, and all that ever came.
  struct Count {
    uint64_t held = 0;
    uint64_t written = 0;
  };
  std::map<RecordSize, Count> counts_ ABSL_GUARDED_BY(mu_);

  // synchronised by itself
  std::atomic<uint64_t> corrupt_pages_ = 0;
};

}  // namespace ebbtide::storage
