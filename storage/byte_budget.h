// SPDX-License-Identifier: Apache-2.0
//
// A hard limit on bytes that several owners share: the host tier's records, and what else lives in
// host memory (digests, score state, staging). Whoever takes memory charges it here first.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <optional>

namespace ebbtide::storage {

// Thread-safe. Outlives everything charged to it.
class ByteBudget {
 public:
  explicit ByteBudget(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}
  ByteBudget(const ByteBudget&) = delete;
  ByteBudget& operator=(const ByteBudget&) = delete;

  // Takes `bytes` if they fit, before the memory itself is taken. False changes nothing. ByteCharge
  // below gives them back by itself.
  [[nodiscard]] bool TryCharge(uint64_t bytes);

  // The same for the owner of the kept memory, which settles what it keeps itself afterwards.
  [[nodiscard]] bool TryChargeWithoutReclaim(uint64_t bytes);

  // Gives back what was charged.
  void Release(uint64_t bytes);

  uint64_t limit_bytes() const { return limit_bytes_; }
  uint64_t used_bytes() const { return used_bytes_.load(std::memory_order_acquire); }
  uint64_t free_bytes() const;

  // `reclaim` is called after each charge, on the charging thread and without a lock: who keeps
  // uncharged memory for reuse gives back what no longer fits in free_bytes(), so that charged and
  // kept memory together stay within the limit. Set once, before the budget is shared.
  void SetReclaim(std::function<void()> reclaim);

 private:
  const uint64_t limit_bytes_;
  std::function<void()> reclaim_;
  std::atomic<uint64_t> used_bytes_ = 0;  // synchronised by itself
};

// Bytes of a budget, given back at the end of its life but for those that somebody keeps: whatever
// goes wrong between charging memory and taking it leaves no charge behind.
class ByteCharge {
 public:
  ByteCharge() = default;  // Of nothing.
  // `bytes` were charged.
  ByteCharge(ByteBudget& budget, uint64_t bytes) : budget_(&budget), bytes_(bytes) {}
  ByteCharge(ByteCharge&& other) noexcept;
  ByteCharge& operator=(ByteCharge&& other) noexcept;
  ~ByteCharge();

  // None where they do not fit.
  static std::optional<ByteCharge> Try(ByteBudget& budget, uint64_t bytes);

  uint64_t bytes() const { return bytes_; }
  // From now on so many of them, at most all, are released by whoever keeps them.
  void Keep(uint64_t bytes);

 private:
  ByteBudget* budget_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace ebbtide::storage
