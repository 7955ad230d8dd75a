// SPDX-License-Identifier: Apache-2.0
//
// Where a daemon listens, as people write it, and as gRPC wants to hear it.

#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebbtide::client {

// "unix:PATH", a bare absolute path, or "HOST:PORT" to a gRPC target. Paths may be relative.
//   kInvalidArgument  anything else; a socket path that the system can't hold
absl::StatusOr<std::string> ParseTarget(std::string_view text);

enum class Asked : uint8_t { kNobodyYet, kAndAnswered };

// For a target that nobody named. Under /tmp anybody may make a user's folder first, and answer in
// the daemon's place. Once somebody answered, the folder is to be there still: connections outlast
// it, and whose it was is not known any more.
//   kPermissionDenied  somebody else did, or may have
absl::Status CheckDefaultTarget(std::string_view target, Asked asked);

}  // namespace ebbtide::client
