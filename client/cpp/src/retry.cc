// SPDX-License-Identifier: Apache-2.0
//
// Attempts of one call: counted, spaced by a doubling backoff, ended by the time limit.

#include "client/cpp/src/retry.h"

#include <algorithm>
#include <utility>

namespace ebbtide::client {

Attempts::Attempts(const RetryPolicy& policy, absl::Duration timeout, Clock& clock, Wait wait,
                   std::stop_token stop)
    : policy_(policy),
      clock_(clock),
      wait_(std::move(wait)),
      stop_(std::move(stop)),
      deadline_(clock.SinceStart() + timeout),
      backoff_(policy.backoff_first) {}

absl::Duration Attempts::remaining() const {
  return std::max(absl::ZeroDuration(), deadline_ - clock_.SinceStart());
}

bool Attempts::Next() {
  if (made_ >= policy_.attempts_max || !HasWaited(backoff_)) return false;
  backoff_ = std::min(2 * backoff_, policy_.backoff_max);
  ++made_;
  return true;
}

bool Attempts::NextLook() {
  if (policy_.look_pause == absl::ZeroDuration()) return Next();
  if (!HasWaited(policy_.look_pause)) return false;
  ++looks_;
  return true;
}

bool Attempts::HasWaited(absl::Duration pause) {
  if (remaining() <= pause || stop_.stop_requested()) return false;
  wait_(pause);
  return !stop_.stop_requested();
}

}  // namespace ebbtide::client
