// SPDX-License-Identifier: Apache-2.0
//
// Errors that a worker can act on: a code for what to do next, a stable reason for programs, a
// message for people. docs/errors.md lists the reasons. Tested by
// tests/unit/service/reason_test.cc.

#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace ebbtide::service {

// An error with its reason attached, e.g. Refuse(kNotFound, "SEQUENCE_UNKNOWN", "no sequence \"a\";
// …").
absl::Status Refuse(absl::StatusCode code, std::string_view reason, std::string_view message);

// The reason of an error made by Refuse, else "".
std::string ReasonOf(const absl::Status& status);

// An error without a reason is the device's (gpu/backend.h), which knows none: it gets DEVICE_FULL,
// HOST_MEMORY_FULL, DEVICE_LOST, or DEVICE_REFUSED. What has a reason keeps it.
absl::Status WithDeviceReason(const absl::Status& status);

}  // namespace ebbtide::service
