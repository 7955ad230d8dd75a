// SPDX-License-Identifier: Apache-2.0
//
// What does not change while a daemon runs, and is told to whoever asks.

#pragma once

#include <string>
#include <vector>

#include "absl/time/time.h"

namespace ebbtide::service {

struct ServerFacts {
  std::string version;
  std::string boot_id;  // 32 hex digits, drawn at start.
  std::string backend;  // "cpu (avx512)"
  bool simulated_device = true;
  std::vector<std::string> transports;
  uint64_t message_bytes_max = 0;
  absl::Duration call_deadline;  // Of calls that come without one.
  std::string default_recall;
  absl::Duration default_idle_timeout;
  absl::Duration started;  // On the steady clock.
  std::vector<std::string> notes;
};

}  // namespace ebbtide::service
