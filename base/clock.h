// SPDX-License-Identifier: Apache-2.0
//
// What time it is. Injected, so that tests move it by hand (tests/support/fake_clock.h).

#pragma once

#include "absl/time/time.h"

namespace ebbtide {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;

  // Steady: never jumps, starts anywhere. For deadlines, leases and durations.
  virtual absl::Duration SinceStart() const = 0;
};

// The machine's steady clock.
Clock& SteadyClock();

}  // namespace ebbtide
