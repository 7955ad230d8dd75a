// SPDX-License-Identifier: Apache-2.0
//
// Ctrl-C as an answer instead of an end: what runs long asks now and then, and leaves in order.

#pragma once

#include "absl/status/status.h"

namespace ebbtide::cli {

// From now on SIGINT, SIGTERM and SIGHUP are noted; a second one ends the program as usual. So is
// that nobody reads standard output any more.
void CatchInterrupts();

// kCancelled once one came.
absl::Status CheckInterrupted();

}  // namespace ebbtide::cli
