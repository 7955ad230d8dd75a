// SPDX-License-Identifier: Apache-2.0
//
// How many calls may be in progress. A call over the bound is turned away at once: threads and
// messages of waiting calls would be a queue without a limit. Tested by
// tests/unit/service/admission_test.cc.

#pragma once

#include <cstdint>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "base/clock.h"

namespace ebbtide::service {

// Thread-safe. Outlives its tickets.
class Admission {
 public:
  struct Limits {
    uint32_t calls = 0;
    // Held by all calls in progress: each its request, as it came or parsed, and its answer where
    // that is larger. A call alone is never refused for its size.
    uint64_t bytes = 0;
    std::string_view advice = "call again later";  // For who is over `calls`.
  };

  // One call in progress, until destroyed.
  class Ticket {
   public:
    Ticket(Admission* admission, uint64_t bytes) : admission_(admission), bytes_(bytes) {}
    Ticket(Ticket&& other) noexcept : admission_(other.admission_), bytes_(other.bytes_) {
      other.admission_ = nullptr;
    }
    Ticket& operator=(Ticket&&) = delete;
    ~Ticket();

    // For so many bytes more. `what`: whose they are, as in "this <what> of 3 MiB would exceed …".
    //   kResourceExhausted  SERVER_BUSY: as Enter; nothing changed
    absl::Status Grow(uint64_t bytes, std::string_view what);

   private:
    Admission* admission_;
    uint64_t bytes_;
  };

  Admission(const Limits& limits, const Clock& clock) : limits_(limits), clock_(clock) {}

  // `bytes`: of the request.
  //   kResourceExhausted  SERVER_BUSY: over a limit; names both numbers
  //   kUnavailable        SHUTTING_DOWN: Close was called
  absl::StatusOr<Ticket> Enter(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);

  // From now on every call is turned away.
  void Close() ABSL_LOCKS_EXCLUDED(mu_);

  // Waits until nothing is in progress, at most `patience`; returns whether nothing is.
  bool WaitIdle(absl::Duration patience) ABSL_LOCKS_EXCLUDED(mu_);

  bool is_closed() const ABSL_LOCKS_EXCLUDED(mu_);

  // For how long the bound has been reached without any call ending.
  absl::Duration StuckFor() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  void Leave(uint64_t bytes) ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status CheckBytes(std::string_view what, uint64_t bytes, uint32_t others) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Limits limits_;
  const Clock& clock_;

  mutable absl::Mutex mu_;
  uint32_t calls_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t bytes_ ABSL_GUARDED_BY(mu_) = 0;
  bool is_closed_ ABSL_GUARDED_BY(mu_) = false;
  absl::Duration full_since_
      ABSL_GUARDED_BY(mu_);  // Of the clock; holds while calls_ is the limit.
};

}  // namespace ebbtide::service
