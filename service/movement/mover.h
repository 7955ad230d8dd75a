// SPDX-License-Identifier: Apache-2.0
//
// Carries blocks down: complete blocks into the host tier (sealing), and from there into the
// RocksDB tier when the host stands over its watermark. Plans come from the cache; it knows bytes
// and tiers, no policy. Tested by tests/unit/service/mover_test.cc and tests/simulation/.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "base/clock.h"
#include "base/executor.h"
#include "gpu/backend.h"
#include "service/cache.h"
#include "storage/block_record.h"
#include "storage/byte_budget.h"
#include "storage/circuit_breaker.h"
#include "storage/tier.h"

namespace ebbtide::service {

// Watermarks of the host tier, in percent of its budget.
inline constexpr uint64_t kDemoteAbovePercent = 85;
inline constexpr uint64_t kDemoteUntilPercent = 75;

struct LowerTiers {
  storage::Tier& host;
  storage::ByteBudget& host_budget;
  uint64_t staging_bytes = 0;                  // Charged to the host tier for good.
  storage::CircuitBreaker* rocksdb = nullptr;  // Null: none.
};

// Thread-safe. What it does of its own accord survives an exception of its device, of a tier or of
// its own: the block keeps its place, what is owed stays owed, and the failure is counted. What is
// noexcept ends the process where memory runs out while it notes what nobody else would know.
class Mover {
 public:
  Mover(Cache& cache, Clock& clock, Executor& carriers, gpu::Backend& backend, LowerTiers tiers)
      : cache_(cache), clock_(clock), carriers_(carriers), backend_(backend), tiers_(tiers) {}

  // Has the carriers seal and move whatever there is to seal and move.
  void Kick() noexcept;

  // Has a degraded tier erase what it owes, which may make room, and looks whether it is well
  // again: whether there are blocks for it or not, since nothing is promised a place there until
  // then.
  void ProbeBelow() noexcept;

  // `bytes` of host memory, for which blocks are moved down until they fit.
  //   kResourceExhausted  LOWER_TIERS_FULL: nothing was charged
  absl::StatusOr<storage::ByteCharge> ChargeHost(uint64_t bytes, absl::Duration deadline);
  // What was kept of a charge.
  void ReleaseHost(uint64_t bytes) { tiers_.host_budget.Release(bytes); }

  // For records of each of `sizes`. Asked by the cache, under its lock.
  LowerRoom RoomOf(std::span<const storage::RecordSize> sizes) const ABSL_LOCKS_EXCLUDED(mu_);

  // Erases a closed sequence's blocks in every tier. A tier that does not answer is asked again
  // later.
  void Erase(std::span<const storage::BlockKey> keys) noexcept;

  // Zeroes a closed sequence's frames and gives them back, unless a carrier still reads them: then
  // the carrier does.
  void Reap(const SequenceRef& sequence) noexcept;

 private:
  // Room for a record, aligned as tiers want it.
  struct RecordBuffer {
    struct Delete {
      void operator()(std::byte* memory) const {
        operator delete[](memory, std::align_val_t{storage::kRecordAlignment});
      }
    };
    std::unique_ptr<std::byte[], Delete> memory;
    uint64_t bytes = 0;
  };

  // Erasures that a tier did not take, and closed sequences whose frames were not zeroed.
  struct Owed {
    std::vector<storage::BlockKey> host;
    std::vector<storage::BlockKey> rocksdb;
    std::vector<SequenceRef> frames;
  };

  void Carry() noexcept;
  void CarryAll();
  void SealAll();
  absl::Status SealOne(const CarryPlan& plan) noexcept;
  void Commit(const CarryPlan& plan, const absl::StatusOr<TierName>& tier);
  // A buffer is kept from one seal to the next: its pages would cost as much as what is written.
  RecordBuffer TakeBuffer(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  void KeepBuffer(RecordBuffer buffer) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<TierName> WriteDown(const CarryPlan& plan, std::span<const std::byte> record);
  // Moves the block longest in the host of those that the tier below has room for. Where the host
  // is full, one of those promised a place below is among them (LowerRoom::Fits).
  bool MoveOneDown() ABSL_LOCKS_EXCLUDED(mu_);
  bool MoveFirstThatFits();
  absl::Status MoveDown(const CarryPlan& plan) noexcept;
  // How many moves have freed room in the host; and whether more have than `before`, once one has
  // or none is under way any more.
  uint64_t Freed() const ABSL_LOCKS_EXCLUDED(mu_);
  bool AwaitFreed(uint64_t before, absl::Duration deadline) const ABSL_LOCKS_EXCLUDED(mu_);
  // In a slot that is made, or in a segment that what is promised leaves room for.
  absl::Status WriteRocksdb(const CarryPlan& plan, std::span<const std::byte> record)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Zero(const OpenedSequence& sequence);
  bool IsDegradedBelow() const;
  // What was not done at once is tried again; what is left is owed. A degraded tier is left to
  // ProbeBelow: carriers do not wait for it again and again.
  void SettleOwed() noexcept ABSL_LOCKS_EXCLUDED(mu_);
  void EraseOrOwe(std::vector<storage::BlockKey> host,
                  std::vector<storage::BlockKey> rocksdb) noexcept ABSL_LOCKS_EXCLUDED(mu_);
  void ZeroOrOwe(std::vector<SequenceRef> frames) noexcept ABSL_LOCKS_EXCLUDED(mu_);
  void EraseFrom(storage::Tier& tier, std::vector<storage::BlockKey>& keys) noexcept;
  void CountFailure(const absl::Status& status) noexcept;
  void NoteFailure(std::string_view what, const absl::Status& status) noexcept
      ABSL_LOCKS_EXCLUDED(mu_);

  // Fixed after construction.
  Cache& cache_;
  Clock& clock_;
  Executor& carriers_;
  gpu::Backend& backend_;
  const LowerTiers tiers_;

  // Synchronised by itself.
  std::atomic<bool> is_kicked_ = false;

  // Guarded by mu_.
  mutable absl::Mutex mu_;
  RecordBuffer spare_ ABSL_GUARDED_BY(mu_);
  int moving_ ABSL_GUARDED_BY(mu_) = 0;      // Who looks for a block to move, or moves one,
  uint64_t freed_ ABSL_GUARDED_BY(mu_) = 0;  // and how often that freed room in the host.
  Owed owed_ ABSL_GUARDED_BY(mu_);
  // When a failure was logged last, and how often it came since.
  struct Failures {
    absl::Duration logged;
    uint64_t unlogged = 0;
  };
  std::map<std::string, Failures> failures_ ABSL_GUARDED_BY(mu_);  // By reason.
};

}  // namespace ebbtide::service
