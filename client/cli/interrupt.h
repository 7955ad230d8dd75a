// SPDX-License-Identifier: Apache-2.0
//
// Ctrl-C as an answer instead of an end: what runs long is told to stop, and leaves in order.
// Contract: tests/unit/client/interrupt_test.cc.

#pragma once

#include <stop_token>

#include "absl/status/status.h"

namespace ebbtide::cli {

// From now on the first SIGINT, SIGTERM or SIGHUP asks for a stop, and so does that nobody reads
// standard output any more. Another signal within half a second is the same one; a later one ends
// the program as usual.
std::stop_token CatchInterrupts();

// kCancelled once one came, or where nobody reads; says which.
absl::Status CheckInterrupted();

}  // namespace ebbtide::cli
