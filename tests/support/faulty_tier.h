// SPDX-License-Identifier: Apache-2.0
//
// Any tier with seeded faults: refusals, a budget used up, delays, torn and flipped bytes. The same
// seed and the same calls give the same faults.

#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

#include "storage/tier.h"

namespace ebbtide::test {

// Chances between 0 and 1, drawn for each call (refuse, full, delay) or each record (torn,
// flipped).
struct Faults {
  double refuse = 0;   // kUnavailable before anything is done: Write, Read, Erase and Probe.
  double full = 0;     // kResourceExhausted, as over budget, before anything is done: Write.
  double delay = 0;    // `on_delay` runs first.
  double torn = 0;     // A written record's bytes past some point in its pages are zeros.
  double flipped = 0;  // One bit of a written record's pages is the other one.
  std::function<void()> on_delay = [] {};
};

// Thread-safe where `tier` is.
class FaultyTier final : public storage::Tier {
 public:
  FaultyTier(storage::Tier& tier, uint64_t seed) : tier_(tier), random_(seed) {}

  // From now on. FaultyTier starts without faults; `{}` heals it, damage done stays.
  void Set(const Faults& faults);

  // Records damaged by `torn` and `flipped` so far.
  uint64_t damaged_records() const;

  std::string_view name() const override { return tier_.name(); }
  absl::Status Write(std::span<const storage::BlockWrite> blocks) override;
  absl::Status Read(std::span<storage::PageRead> pages, absl::Duration patience) override;
  storage::BlockPin Pin(const storage::BlockKey& key) override { return tier_.Pin(key); }
  absl::Status Erase(std::span<const storage::BlockKey> keys) override;
  absl::Status Probe() override;
  storage::TierUsage Usage() const override { return tier_.Usage(); }
  storage::TierRoom Room(std::span<const storage::RecordSize> sizes) const override {
    return tier_.Room(sizes);
  }

 private:
  bool Draw(double chance) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status BeforeCall(std::string_view call) ABSL_LOCKS_EXCLUDED(mu_);
  // The record with a fault drawn for it; empty where it stays sound.
  std::vector<std::byte> Damage(std::span<const std::byte> record) ABSL_LOCKS_EXCLUDED(mu_);

  storage::Tier& tier_;
  mutable absl::Mutex mu_;
  Faults faults_ ABSL_GUARDED_BY(mu_);
  std::mt19937_64 random_ ABSL_GUARDED_BY(mu_);
  uint64_t damaged_records_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace ebbtide::test
