// SPDX-License-Identifier: Apache-2.0
//
// Counts what service/rpc refused or cut off by itself, by reason; the engine counts its own.
// GetStats adds both.

#pragma once

#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"

#include "service/calls.h"
#include "service/reason.h"

namespace ebbtide::service {

// Thread-safe.
class Refusals {
 public:
  // Counts `status` where it is an error, and passes it on.
  absl::Status Counted(absl::Status status) ABSL_LOCKS_EXCLUDED(mu_) {
    if (!status.ok()) Count(ReasonOf(status), 1);
    return status;
  }

  void Count(const std::string& reason, int calls) ABSL_LOCKS_EXCLUDED(mu_) {
    if (calls == 0) return;
    absl::MutexLock lock(&mu_);
    counts_[reason] += static_cast<uint64_t>(calls);
  }

  CountByReason counts() const ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return counts_;
  }

 private:
  mutable absl::Mutex mu_;
  CountByReason counts_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ebbtide::service
