// SPDX-License-Identifier: Apache-2.0
//
// Counts what service/rpc refused by itself, by reason; the engine counts its own. GetStats adds
// both.

#pragma once

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
    if (!status.ok()) {
      absl::MutexLock lock(&mu_);
      ++counts_[ReasonOf(status)];
    }
    return status;
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
