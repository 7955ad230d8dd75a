// SPDX-License-Identifier: Apache-2.0
//
// A clock that a test moves by hand.

#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "base/clock.h"

namespace ebbtide::test {

// Thread-safe.
class FakeClock final : public Clock {
 public:
  absl::Duration SinceStart() const override ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    return since_start_;
  }

  void Advance(absl::Duration by) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    since_start_ += by;
  }

 private:
  mutable absl::Mutex mu_;
  absl::Duration since_start_ ABSL_GUARDED_BY(mu_) =
      absl::Seconds(1000);  // Not 0: "unset" differs.
};

}  // namespace ebbtide::test
