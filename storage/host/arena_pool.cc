// SPDX-License-Identifier: Apache-2.0

#include "storage/host/arena_pool.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"

#include "base/bytes.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "storage/block_record.h"

namespace ebbtide::storage {
namespace {

// Addresses cost nothing while no memory lies behind them, so the arena has four times the budget:
// records of mixed sizes then find a long enough range although the free bytes are scattered.
constexpr uint64_t kAddressesPerByte = 4;

// Enough for a burst of erased blocks to be written again at full rate, little enough that an idle
// daemon's memory follows what it holds.
constexpr uint64_t kWarmBytesMax = uint64_t{256} << 20;
constexpr uint64_t kWarmShare = 16;  // Of the budget, where that is less.

constexpr size_t kTrimmedAtOnce = 8;
// Where registering is refused it usually stays so, and each try writes a record twice. Of stores,
// whether they find room or not.
constexpr uint32_t kUnregisteredAfterRefusal = 64;

}  // namespace

absl::StatusOr<std::shared_ptr<ArenaPool>> ArenaPool::Create(ByteBudget& budget) {
  const uint64_t bytes =
      RoundUp(std::max<uint64_t>(budget.limit_bytes(), 1), kRecordAlignment) * kAddressesPerByte;
  EBBTIDE_ASSIGN_OR_RETURN(std::unique_ptr<ShmArena> arena, ShmArena::Create(bytes));
  std::shared_ptr<ArenaPool> pool(new ArenaPool(budget, std::move(arena)));
  budget.SetReclaim([weak = std::weak_ptr(pool)] {
    if (const auto alive = weak.lock()) alive->Trim(alive->warm_bytes_limit_);
  });
  return pool;
}

ArenaPool::ArenaPool(ByteBudget& budget, std::unique_ptr<ShmArena> arena)
    : budget_(budget),
      arena_(std::move(arena)),
      warm_bytes_limit_(std::min(kWarmBytesMax, budget.limit_bytes() / kWarmShare)),
      reachable_bytes_(arena_->size() / 2) {
  cold_.Free({.offset = 0, .bytes = arena_->size()});
}

std::span<const std::byte> ArenaPool::reachable() const {
  return arena_->bytes({.offset = 0, .bytes = reachable_bytes_});
}

void ArenaPool::RegisterWith(RegisterMemory registers) {
  absl::MutexLock lock(&mu_);
  EBBTIDE_CHECK(!register_ && cold_.free_bytes() == arena_->size(),
                "what registers is told once, and before anything is stored");
  register_ = std::move(registers);
  cold_reachable_.Free(*cold_.Allocate(reachable_bytes_));
}

absl::StatusOr<Extent> ArenaPool::Store(std::span<const std::byte> bytes, uint64_t overhead_bytes) {
  EBBTIDE_CHECK(bytes.size() % kRecordAlignment == 0, "records are padded to whole 4 KiB");
  const uint64_t charge = bytes.size() + overhead_bytes;
  // The extent first: a warm one needs no trim to make room for its own charge.
  std::optional<Taken> taken = Take(bytes.size());
  if (!taken) {
    Trim(0);  // Warm ones and their cold neighbours may be long enough together.
    taken = Take(bytes.size());
  }
  if (!taken) {
    return absl::ResourceExhaustedError(absl::StrCat("host tier: no free range of ", bytes.size(),
                                                     " B in the arena; demote or evict first"));
  }
  if (!Charge(*taken, charge)) {
    return absl::ResourceExhaustedError(
        absl::StrCat("host tier: ", charge, " B over budget, ", budget_.free_bytes(), " B of ",
                     budget_.limit_bytes(), " B free; demote or evict first"));
  }
  if (taken->is_warm) {
    std::memcpy(arena_->bytes(taken->extent).data(), bytes.data(), bytes.size());
    return taken->extent;
  }
  absl::Cleanup release = [&] { budget_.Release(charge); };
  EBBTIDE_ASSIGN_OR_RETURN(const Extent extent, Commit(taken->extent, bytes));
  std::move(release).Cancel();
  return extent;
}

absl::StatusOr<Extent> ArenaPool::Commit(const Extent& extent, std::span<const std::byte> bytes) {
  {
    absl::Cleanup decommit = [&] { Decommit(extent); };
    EBBTIDE_RETURN_IF_ERROR(arena_->Fill(extent, bytes));
    if (!IsReachable(extent) || Register(extent).ok()) {
      std::move(decommit).Cancel();
      return extent;
    }
  }
  std::optional<Extent> other = TakeUnregistered(extent.bytes);
  if (!other) {
    Trim(0);
    other = TakeUnregistered(extent.bytes);
  }
  if (!other) {
    return absl::ResourceExhaustedError(
        absl::StrCat("host tier: no free range of ", extent.bytes,
                     " B in the arena beside those that a device reaches; demote or evict first"));
  }
  absl::Cleanup decommit = [&] { Decommit(*other); };
  EBBTIDE_RETURN_IF_ERROR(arena_->Fill(*other, bytes));
  std::move(decommit).Cancel();
  return *other;
}

absl::Status ArenaPool::Register(const Extent& extent) {
  absl::StatusOr<std::shared_ptr<void>> held = register_(arena_->bytes(extent));
  {
    absl::MutexLock lock(&mu_);
    if (held.ok()) {
      registered_[extent.offset] = *std::move(held);
      return absl::OkStatus();
    }
    unregistered_next_ = kUnregisteredAfterRefusal;
    if (std::exchange(has_told_refusal_, true)) return held.status();
  }
  Log(LogLevel::kWarn,
      "host tier: memory can't be registered with the device; what lies in it is copied when it is "
      "read (said once)",
      {{"bytes", extent.bytes}, {"why", std::string(held.status().message())}});
  return held.status();
}

std::optional<Extent> ArenaPool::TakeUnregistered(uint64_t bytes) noexcept {
  absl::MutexLock lock(&mu_);
  return cold_.Allocate(bytes);
}

void ArenaPool::Decommit(const Extent& extent) noexcept {
  std::shared_ptr<void> held;  // Goes outside the lock, and before the memory does.
  {
    absl::MutexLock lock(&mu_);
    if (const auto found = registered_.find(extent.offset); found != registered_.end()) {
      held = std::move(found->second);
      registered_.erase(found);
    }
  }
  held.reset();
  arena_->Decommit(extent);  // Takes time with its bytes.
  absl::MutexLock lock(&mu_);
  ColdOf(extent).Free(extent);
}

void ArenaPool::Free(const Extent& extent, uint64_t overhead_bytes) noexcept {
  bool others_trim = false;
  {
    absl::MutexLock lock(&mu_);
    warm_.Put(extent);
    others_trim = is_trimming_;  // They look again before they are done.
  }
  // Released only now: whoever charges these bytes next finds them warm and has them trimmed.
  budget_.Release(extent.bytes + overhead_bytes);
  if (!others_trim) Trim(warm_bytes_limit_);
}

std::optional<ArenaPool::Taken> ArenaPool::Take(uint64_t bytes) noexcept {
  absl::MutexLock lock(&mu_);
  if (const auto extent = warm_.Take(bytes)) {
    taken_warm_bytes_ += bytes;
    return Taken{.extent = *extent, .is_warm = true};
  }
  const bool avoids_reachable = unregistered_next_ > 0;
  if (avoids_reachable) --unregistered_next_;
  for (ExtentMap* const map : {avoids_reachable ? &cold_ : &cold_reachable_,
                               avoids_reachable ? &cold_reachable_ : &cold_}) {
    if (const auto extent = map->Allocate(bytes)) return Taken{.extent = *extent, .is_warm = false};
  }
  return std::nullopt;
}

bool ArenaPool::Charge(const Taken& taken, uint64_t bytes) noexcept {
  const bool is_charged = budget_.TryChargeWithoutReclaim(bytes);
  {
    absl::MutexLock lock(&mu_);
    if (taken.is_warm) taken_warm_bytes_ -= taken.extent.bytes;
    if (!is_charged && taken.is_warm) warm_.Put(taken.extent);
    if (!is_charged && !taken.is_warm) ColdOf(taken.extent).Free(taken.extent);
  }
  Trim(warm_bytes_limit_);
  return is_charged;
}

void ArenaPool::Trim(uint64_t warm_bytes_max) noexcept {
  for (;;) {
    std::vector<Extent> excess;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(
          +[](bool* is_trimming) { return !*is_trimming; }, &is_trimming_));
      const uint64_t kept_bytes = std::min(warm_bytes_max, WarmBytesAllowed());
      while (warm_.bytes() > kept_bytes && excess.size() < kTrimmedAtOnce)
        excess.push_back(*warm_.TakeLongest());
      is_trimming_ = !excess.empty();
    }
    if (excess.empty()) return;
    for (const Extent& extent : excess) Decommit(extent);
    absl::MutexLock lock(&mu_);
    is_trimming_ = false;
  }
}

uint64_t ArenaPool::WarmBytesAllowed() const {
  // Read under the lock: a charge that comes later trims after us. Another thread's warm extent
  // that is not charged yet is held too.
  const uint64_t free_bytes = budget_.free_bytes();
  return free_bytes - std::min(free_bytes, taken_warm_bytes_);
}

}  // namespace ebbtide::storage
