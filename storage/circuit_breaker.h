// SPDX-License-Identifier: Apache-2.0
//
// A tier that is written to no more while its medium fails: from the first write or erasure that it
// does not answer, writes are refused at once, until a probe finds it well. Erasures go through,
// since they make room on a disk that is full, and so do reads. One that fails is told for a minute
// and stops nothing: a bad sector is no reason to write nothing, and that others are read well none
// to think it gone. Tested by tests/unit/storage/circuit_breaker_test.cc.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "base/clock.h"
#include "storage/tier.h"

namespace ebbtide::storage {

// Thread-safe. Logs failures of reads, and those of all else, once a minute at most.
class CircuitBreaker final : public Tier {
 public:
  CircuitBreaker(Tier& tier, Clock& clock) : tier_(tier), clock_(clock) {}

  // Why writes are refused now; "" where they are not. A budget that is used up is no
  // fault.
  std::string why_no_writes() const ABSL_LOCKS_EXCLUDED(mu_);

  // That, or why a read failed within the last minute; "" where the tier is well.
  std::string why_degraded() const ABSL_LOCKS_EXCLUDED(mu_);

  std::string_view name() const override { return tier_.name(); }
  absl::Status Write(std::span<const BlockWrite> blocks) override;
  absl::Status Read(std::span<PageRead> pages, absl::Duration patience) override;
  BlockPin Pin(const BlockKey& key) override { return tier_.Pin(key); }
  absl::Status Erase(std::span<const BlockKey> keys) override;
  absl::Status Probe() override;
  TierUsage Usage() const override { return tier_.Usage(); }
  TierRoom Room(std::span<const RecordSize> sizes) const override { return tier_.Room(sizes); }

 private:
  // Failures of one kind.
  struct Failures {
    std::string last = "";
    absl::Duration at = -absl::InfiniteDuration();
    absl::Duration logged = -absl::InfiniteDuration();
    uint64_t unlogged = 0;
  };

  void Open(const absl::Status& failure) ABSL_LOCKS_EXCLUDED(mu_);
  void Close() ABSL_LOCKS_EXCLUDED(mu_);
  void NoteRead(const absl::Status& failure) ABSL_LOCKS_EXCLUDED(mu_);
  // Returns how many are to be logged now; 0 while it is quiet.
  uint64_t Count(const absl::Status& failure, Failures& failures)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Tier& tier_;
  Clock& clock_;
  mutable absl::Mutex mu_;
  Failures writes_ ABSL_GUARDED_BY(mu_);  // And of erasures and probes.
  Failures reads_ ABSL_GUARDED_BY(mu_);
  bool is_open_ ABSL_GUARDED_BY(mu_) = false;  // As a circuit is: no write passes.
  bool is_told_ ABSL_GUARDED_BY(mu_) = false;  // Of that the log spoke last.
};

}  // namespace ebbtide::storage
