// SPDX-License-Identifier: Apache-2.0
//
// Extents of the host arena, charged to a budget. Freed extents stay warm (they keep their memory)
// up to a limit, since writing warm memory runs at memcpy's rate and taking new memory at a third
// of it (tier_bench, SealToHost). Memory held, warm or charged, never passes the budget.
//
// Where a device reads host memory in place, an extent is registered with it (page-locked) as it
// takes memory, and until it gives that back. What can't be lies in the other half of the
// addresses, and after a refusal the next records do too, for a while.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

#include "storage/byte_budget.h"
#include "storage/host/extent_map.h"
#include "storage/host/shm_arena.h"
#include "storage/host/warm_extents.h"

namespace ebbtide::storage {

// Thread-safe. What is noexcept moves extents between maps: memory that runs out half-way ends the
// process, since half a move would lose some.
class ArenaPool {
 public:
  // `budget` outlives the pool; while the pool lives it gives warm memory back as others charge.
  static absl::StatusOr<std::shared_ptr<ArenaPool>> Create(ByteBudget& budget);

  // Has a device reach memory in place, until what it returns goes.
  using RegisterMemory = std::function<absl::StatusOr<std::shared_ptr<void>>(std::span<std::byte>)>;

  // The addresses whose memory RegisterWith has registered: half of the arena's.
  std::span<const std::byte> reachable() const;
  // Once, before anything is stored.
  void RegisterWith(RegisterMemory registers) ABSL_LOCKS_EXCLUDED(mu_);

  // Copies `bytes` (a multiple of 4096) into an extent, charged with `overhead_bytes` beside it.
  // The extent is overwritten from end to end, so nothing of its former owner can be read in it.
  //   kResourceExhausted  over budget, or the machine has no memory left
  absl::StatusOr<Extent> Store(std::span<const std::byte> bytes, uint64_t overhead_bytes);

  // Gives back what Store gave, with the same overhead.
  void Free(const Extent& extent, uint64_t overhead_bytes) noexcept;

  std::span<const std::byte> bytes(const Extent& extent) const { return arena_->bytes(extent); }
  const ShmArena& arena() const { return *arena_; }

 private:
  struct Taken {
    Extent extent;
    bool is_warm = false;
  };

  ArenaPool(ByteBudget& budget, std::unique_ptr<ShmArena> arena);

  std::optional<Taken> Take(uint64_t bytes) noexcept ABSL_LOCKS_EXCLUDED(mu_);
  bool Charge(const Taken& taken, uint64_t bytes) noexcept ABSL_LOCKS_EXCLUDED(mu_);
  // Fills a cold extent, and registers it where it is to be; where that is refused, another one.
  absl::StatusOr<Extent> Commit(const Extent& extent, std::span<const std::byte> bytes)
      ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status Register(const Extent& extent) ABSL_LOCKS_EXCLUDED(mu_);
  std::optional<Extent> TakeUnregistered(uint64_t bytes) noexcept ABSL_LOCKS_EXCLUDED(mu_);
  void Decommit(const Extent& extent) noexcept ABSL_LOCKS_EXCLUDED(mu_);
  bool IsReachable(const Extent& extent) const {
    return register_ && extent.offset < reachable_bytes_;
  }
  ExtentMap& ColdOf(const Extent& extent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return IsReachable(extent) ? cold_reachable_ : cold_;
  }
  // Gives warm memory back to the machine until no more than `warm_bytes_max` is left and all that
  // is held fits the budget. A few extents at a time: others wait for those, for their memory is
  // held until they are gone, and unregistering may wait for the device.
  void Trim(uint64_t warm_bytes_max) noexcept ABSL_LOCKS_EXCLUDED(mu_);
  uint64_t WarmBytesAllowed() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // fixed after construction
  ByteBudget& budget_;
  const std::unique_ptr<ShmArena> arena_;
  const uint64_t warm_bytes_limit_;
  const uint64_t reachable_bytes_;

  // set once, before anything is stored
  RegisterMemory register_;

  // guarded by mu_
  mutable absl::Mutex mu_;
  WarmExtents warm_ ABSL_GUARDED_BY(mu_);          // Free, still holding memory.
  ExtentMap cold_reachable_ ABSL_GUARDED_BY(mu_);  // Free, holding none: to be registered,
  ExtentMap cold_ ABSL_GUARDED_BY(mu_);            // and the others.
  absl::flat_hash_map<uint64_t, std::shared_ptr<void>> registered_
      ABSL_GUARDED_BY(mu_);                              // By offset.
  uint32_t unregistered_next_ ABSL_GUARDED_BY(mu_) = 0;  // Records after a refusal.
  bool has_told_refusal_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t taken_warm_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // Taken from warm_, not charged yet.
  bool is_trimming_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace ebbtide::storage
