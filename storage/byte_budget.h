// SPDX-License-Identifier: Apache-2.0
//
// A hard limit on bytes that several owners share: the host tier's records, and what else lives in
// host memory (digests, score state, staging). Whoever takes memory charges it here first.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace ebbtide::storage {

// Thread-safe. Outlives everything charged to it.
class ByteBudget {
 public:
  explicit ByteBudget(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}
  ByteBudget(const ByteBudget&) = delete;
  ByteBudget& operator=(const ByteBudget&) = delete;

  // Takes `bytes` if they fit, before the memory itself is taken. False changes nothing.
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

}  // namespace ebbtide::storage
