// SPDX-License-Identifier: Apache-2.0
//
// When a call may be sent again, and how long to wait before. Knows time and counts, no wire.
// Contract: tests/unit/client/retry_test.cc.

#pragma once

#include <functional>
#include <stop_token>

#include "absl/time/time.h"

#include "base/clock.h"

namespace ebbtide::client {

struct RetryPolicy {
  int attempts_max = 4;  // The first included.
  absl::Duration backoff_first = absl::Milliseconds(20);
  absl::Duration backoff_max = absl::Seconds(1);
  // How long before another look at what somebody else is busy with; looks are not counted as
  // attempts. Zero: they are attempts like any other.
  absl::Duration look_pause = absl::ZeroDuration();
};

// The attempts of one call under one time limit. Thread-compatible.
class Attempts {
 public:
  using Wait = std::function<void(absl::Duration)>;

  // `wait` may come back early once `stop` is asked for; then no further attempt is made.
  Attempts(const RetryPolicy& policy, absl::Duration timeout, Clock& clock, Wait wait,
           std::stop_token stop = {});

  // What is left for the attempt about to be made; never negative.
  absl::Duration remaining() const;

  const std::stop_token& stop() const { return stop_; }

  int made() const { return made_; }
  int looks() const { return looks_; }

  // Waits out the backoff before another attempt. False, without waiting, where none is left or the
  // time limit would pass meanwhile; and where a stop was asked for.
  bool Next();

  // The same before another look.
  bool NextLook();

 private:
  bool HasWaited(absl::Duration pause);

  const RetryPolicy policy_;
  Clock& clock_;
  const Wait wait_;
  const std::stop_token stop_;
  const absl::Duration deadline_;
  absl::Duration backoff_;
  int made_ = 1;
  int looks_ = 1;
};

}  // namespace ebbtide::client
