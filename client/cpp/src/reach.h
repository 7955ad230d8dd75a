// SPDX-License-Identifier: Apache-2.0
//
// Why nobody answers at an endpoint, for whoever reads it: looks at the socket, where gRPC says no
// more than that connecting failed. Contract: tests/unit/client/reach_test.cc.

#pragma once

#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace ebbtide::client {

// A call that did not come through.
struct Unanswered {
  std::string call;       // "Attend"
  std::string target;     // As ParseTarget answers it.
  std::string said;       // gRPC's words for it.
  bool is_first = false;  // Nothing has been heard from the endpoint yet: it may be anybody's.
};

// kUnavailable, or kPermissionDenied where the socket is closed to this user; names the endpoint,
// what stands there, and what to do about it.
absl::Status WhyUnreachable(const Unanswered& unanswered);

// Of an endpoint where somebody listens whose first answer is none of ours.
std::string IsNoDaemon(std::string_view target, std::string_view why);

}  // namespace ebbtide::client
