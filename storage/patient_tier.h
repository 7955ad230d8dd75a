// SPDX-License-Identifier: Apache-2.0
//
// A tier on a medium that may never answer (a hung disk, a stale mount), behind callers who must
// not hang with it: each call waits for a limited time, then goes on without. While a call that has
// outlasted the limit still runs, the tier refuses all others at once; a reader in a hurry may
// leave before that, and no write or erasure overtakes what it left. So no more than a few threads
// are ever stuck. Tested by tests/unit/storage/patient_tier_test.cc.

#pragma once

#include <functional>
#include <list>
#include <memory>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "base/clock.h"
#include "base/executor.h"
#include "storage/tier.h"

namespace ebbtide::storage {

struct Patience {
  absl::Duration limit = absl::Seconds(5);  // For any one call.
  int threads = 8;                          // Calls at work at one time; others queue.
};

// Thread-safe. A call that is given up keeps copies of all it needs, and its outcome is not known:
// kUnavailable, as for any call that a medium did not answer. Destruction waits for it.
class PatientTier final : public Tier {
 public:
  PatientTier(std::unique_ptr<Tier> tier, const Patience& patience);

  std::string_view name() const override { return tier_->name(); }
  absl::Status Write(std::span<const BlockWrite> blocks) override;
  absl::Status Read(std::span<PageRead> pages, absl::Duration patience) override;
  BlockPin Pin(const BlockKey& key) override { return tier_->Pin(key); }
  absl::Status Erase(std::span<const BlockKey> keys) override;
  absl::Status Probe() override;
  TierUsage Usage() const override { return tier_->Usage(); }
  TierRoom Room(std::span<const RecordSize> sizes) const override { return tier_->Room(sizes); }

 private:
  struct Call;

  // What a call does to the tier: a reader may leave early, all else waits for those who left.
  enum class Access : uint8_t { kReads, kChanges };
  struct Job {
    std::string_view what;
    Access access;
    absl::Duration patience;
    std::function<absl::Status()> work;
  };

  // Runs the job on another thread and waits for it; what it throws is thrown here.
  absl::Status Wait(Job job) ABSL_LOCKS_EXCLUDED(mu_);
  bool IsStuck() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Run(Call& call, const std::function<absl::Status()>& work) ABSL_LOCKS_EXCLUDED(mu_);

  // Fixed after construction.
  const std::unique_ptr<Tier> tier_;
  const absl::Duration limit_;
  Clock& clock_ = SteadyClock();

  absl::Mutex mu_;
  std::list<std::shared_ptr<Call>> left_ ABSL_GUARDED_BY(mu_);  // They run, with nobody waiting.

  const std::unique_ptr<Executor> threads_;  // Last: its jobs use everything above.
};

}  // namespace ebbtide::storage
