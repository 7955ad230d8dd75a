// SPDX-License-Identifier: Apache-2.0
//
// The right to listen at a unix socket's path. gRPC unlinks whatever socket lies there, even one
// that somebody listens at; a claim looks first. Tested by tests/unit/service/socket_claim_test.cc.

#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace ebbtide::service {

// Held from the look until the server listens, so that of two daemons that start at one time only
// one finds the place free.
class SocketClaim {
 public:
  // Makes the folder (0700) where there is none, waits for other claims on it, and removes a socket
  // that nobody listens at.
  //   kFailedPrecondition  somebody listens there (names process and user), something else than a
  //                        socket lies there, or the folder belongs to another user
  //   kPermissionDenied, kNotFound, …  the system's own words for a folder that can't be used
  static absl::StatusOr<SocketClaim> Take(const std::string& path);

  // The same, waiting for nobody.
  //   kUnavailable  somebody else has a claim on the folder
  static absl::StatusOr<SocketClaim> TryTake(const std::string& path);

  SocketClaim(SocketClaim&& other) noexcept;
  SocketClaim& operator=(SocketClaim&&) = delete;
  ~SocketClaim();

  // Sets the socket's mode, once it is there.
  absl::Status SetMode(unsigned mode) const;

 private:
  static absl::StatusOr<SocketClaim> TakeBy(int lock, const std::string& path);
  SocketClaim(std::string path, int folder) : path_(std::move(path)), folder_(folder) {}

  std::string path_;
  int folder_;  // Open and locked.
};

}  // namespace ebbtide::service
