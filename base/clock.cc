// SPDX-License-Identifier: Apache-2.0

#include "base/clock.h"

#include <chrono>

namespace ebbtide {
namespace {

class MachineClock final : public Clock {
 public:
  absl::Duration SinceStart() const override {
    return absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
  }
};

}  // namespace

Clock& SteadyClock() {
  static MachineClock clock;
  return clock;
}

}  // namespace ebbtide
