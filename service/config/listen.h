// SPDX-License-Identifier: Apache-2.0
//
// The text form of a place to listen at: "unix:/PATH" or "HOST:PORT".

#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

#include "service/config/config.h"

namespace ebbtide::service {

//   kInvalidArgument  neither form, a path that is relative or too long for a socket, a host
//                     that is not loopback, a port out of range
absl::StatusOr<ListenConfig> ParseListen(std::string_view text);

std::string FormatListen(const ListenConfig& listen);

}  // namespace ebbtide::service
