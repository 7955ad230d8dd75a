// SPDX-License-Identifier: Apache-2.0
//
// A tier that is asked no more while its medium fails: from the first write or erasure that it does
// not answer, all are refused at once, until a probe finds it well. Reads go through in any case,
// and tell how it is too. Tested by tests/unit/storage/circuit_breaker_test.cc.

#pragma once

#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "storage/tier.h"

namespace ebbtide::storage {

// Thread-safe.
class CircuitBreaker final : public Tier {
 public:
  explicit CircuitBreaker(Tier& tier) : tier_(tier) {}

  // Why writes are refused now, or reads failed last; "" where the tier is well. A budget that is
  // used up is no fault.
  std::string why() const ABSL_LOCKS_EXCLUDED(mu_);

  std::string_view name() const override { return tier_.name(); }
  absl::Status Write(std::span<const BlockWrite> blocks) override;
  absl::Status Read(std::span<PageRead> pages, absl::Duration patience) override;
  BlockPin Pin(const BlockKey& key) override { return tier_.Pin(key); }
  absl::Status Erase(std::span<const BlockKey> keys) override;
  absl::Status Probe() override;
  TierUsage Usage() const override { return tier_.Usage(); }
  TierRoom Room(std::span<const RecordSize> sizes) const override { return tier_.Room(sizes); }

 private:
  absl::Status CheckClosed() const ABSL_LOCKS_EXCLUDED(mu_);
  void Note(std::string CircuitBreaker::*failure, const absl::Status& status)
      ABSL_LOCKS_EXCLUDED(mu_);

  Tier& tier_;
  mutable absl::Mutex mu_;
  std::string write_failure_ ABSL_GUARDED_BY(mu_);  // Of a write, an erasure or a probe.
  std::string read_failure_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ebbtide::storage
