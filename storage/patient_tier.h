// SPDX-License-Identifier: Apache-2.0
//
// A tier on a medium that may never answer (a hung disk, a stale mount), behind callers who must
// not hang with it: each call waits for a limited time, then goes on without. What no thread has
// begun by then is never done; what one has goes on, and no write or erasure begins while one that
// was left still runs. While a call that has itself run for the limit still runs, reads are refused
// at once, and changes where it is one itself or all threads are so: one bad sector stops no write.
// So no more threads are ever stuck than there are here, nor more memory than their calls hold.
// Tested by tests/unit/storage/patient_tier_test.cc.

#pragma once

#include <cstdint>
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
  PatientTier(std::unique_ptr<Tier> tier, const Patience& patience, Clock& clock = SteadyClock());
  ~PatientTier() override;

  std::string_view name() const override { return tier_->name(); }
  absl::Status Write(std::span<const BlockWrite> blocks) override;
  absl::Status Read(std::span<PageRead> pages, absl::Duration patience) override;
  BlockPin Pin(const BlockKey& key) override { return tier_->Pin(key); }
  absl::Status Erase(std::span<const BlockKey> keys) override;
  absl::Status Probe() override;
  TierUsage Usage() const override { return tier_->Usage(); }
  TierRoom Room(std::span<const RecordSize> sizes) const override { return tier_->Room(sizes); }

 private:
  // Changes go before reads, of which there may be many.
  enum class Access : uint8_t { kReads, kChanges };
  struct Job {
    std::string_view what;
    Access access;
    absl::Duration patience;
    std::function<absl::Status()> work;
  };
  struct Call;
  using Calls = std::list<std::shared_ptr<Call>>;

  // Runs the job on another thread and waits for it; what it throws is thrown here.
  absl::Status Wait(Job job) ABSL_LOCKS_EXCLUDED(mu_);
  // Runs jobs until the end: each thread does.
  void Work() ABSL_LOCKS_EXCLUDED(mu_);
  bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool MayBeginAChange() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsStuck(Access access) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Refused(std::string_view what) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // Fixed after construction.
  const std::unique_ptr<Tier> tier_;
  const absl::Duration limit_;
  const size_t threads_max_;
  Clock& clock_;

  absl::Mutex mu_;
  bool is_ending_ ABSL_GUARDED_BY(mu_) = false;
  Calls changes_ ABSL_GUARDED_BY(mu_);  // They wait for a thread,
  Calls reads_ ABSL_GUARDED_BY(mu_);    // these too.
  Calls running_ ABSL_GUARDED_BY(mu_);  // One on each thread that is busy.

  const std::unique_ptr<Executor> threads_;  // Last: its jobs use everything above.
};

}  // namespace ebbtide::storage
