// SPDX-License-Identifier: Apache-2.0
//
// A batched step over the wire: one status per item, items whose first attempt is still in flight
// asked for again, and items of an earlier run of the daemon told so.

#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "client/cpp/src/connection.h"
#include "ebbtide/sequence.h"

namespace ebbtide::client {

absl::StatusOr<std::vector<AppendResult>> CallAppend(Connection& connection, const Step& step,
                                                     std::span<const AppendItem> items);
absl::StatusOr<std::vector<AttendResult>> CallAttend(Connection& connection, const Step& step,
                                                     std::span<const AttendItem> items);

// kAborted, DAEMON_RESTARTED, where `answering_boot_id` is not the run that `sequence` was opened
// in.
absl::Status CheckBoot(const Connection& connection, const Sequence& sequence,
                       std::string_view answering_boot_id);

}  // namespace ebbtide::client
