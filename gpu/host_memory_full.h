// SPDX-License-Identifier: Apache-2.0
//
// Memory that is missing on this machine's side of a device, told apart from the device's own: what
// is carried over and back lies in memory that the machine locks.
// Tested by tests/unit/service/reason_test.cc.

#pragma once

#include <string_view>

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"

namespace ebbtide::gpu {

inline constexpr char kHostMemoryUrl[] = "ebbtide.dev/host_memory";

// kResourceExhausted; `message` says what was asked for and what to do.
inline absl::Status HostMemoryFull(std::string_view message) {
  absl::Status status =
      absl::ResourceExhaustedError(absl::string_view(message.data(), message.size()));
  status.SetPayload(kHostMemoryUrl, absl::Cord());
  return status;
}

inline bool IsHostMemoryFull(const absl::Status& status) {
  return status.GetPayload(kHostMemoryUrl).has_value();
}

}  // namespace ebbtide::gpu
