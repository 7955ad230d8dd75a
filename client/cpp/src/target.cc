// SPDX-License-Identifier: Apache-2.0
//
// Endpoints: "unix:PATH" or "HOST:PORT", and the default that daemon and client agree on.

#include "client/cpp/src/target.h"

#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"

#include "ebbtide/client.h"

namespace ebbtide::client {
namespace {

constexpr std::string_view kUnix = "unix:";
// gRPC reads a target as a URI, and splits it at commas.
constexpr std::string_view kPathSigns = "-._~!$&'()*+;=:@/";
constexpr std::string_view kOwnFolder = "unix:/tmp/ebbtide-";  // And a user's number.

absl::StatusOr<std::string> UnixTarget(std::string_view path) {
  constexpr size_t kPathMax = sizeof(sockaddr_un::sun_path) - 1;
  if (path.empty() || path.size() > kPathMax) {
    return absl::InvalidArgumentError(
        absl::StrFormat("endpoint: socket path \"%s\" has %u bytes; 1 to %u are allowed", path,
                        path.size(), kPathMax));
  }
  const auto sign = std::ranges::find_if(path, [](char c) {
    return !absl::ascii_isalnum(static_cast<unsigned char>(c)) &&
           kPathSigns.find(c) == std::string_view::npos;
  });
  if (sign != path.end()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("endpoint: socket path \"%s\" has '%s', which gRPC can't connect to; "
                        "letters, digits and %s are allowed",
                        path, absl::CHexEscape(std::string(1, *sign)), kPathSigns));
  }
  return std::string(kUnix).append(path);
}

}  // namespace

absl::StatusOr<std::string> ParseTarget(std::string_view text) {
  if (text.starts_with(kUnix)) return UnixTarget(text.substr(kUnix.size()));
  if (text.starts_with('/')) return UnixTarget(text);
  const size_t colon = text.rfind(':');
  uint32_t port = 0;
  if (colon == std::string_view::npos || colon == 0 ||
      !absl::SimpleAtoi(absl::string_view(text.data() + colon + 1, text.size() - colon - 1),
                        &port) ||
      port == 0 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "endpoint \"%s\": give unix:PATH or HOST:PORT with a port of 1 to 65535", text));
  }
  return std::string(text);
}

std::string DefaultTarget() {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nobody sets it while we run
  if (const char* socket = std::getenv("EBBTIDE_SOCKET"); socket != nullptr && *socket != '\0') {
    return socket;
  }
  // As the daemon (service/config/surroundings.cc): a folder that is not there is none.
  // NOLINTNEXTLINE(concurrency-mt-unsafe): nobody sets it while we run
  const char* run = std::getenv("XDG_RUNTIME_DIR");
  std::error_code error;
  if (run != nullptr && *run == '/' && std::filesystem::is_directory(run, error)) {
    return absl::StrFormat("unix:%s/ebbtide.sock", run);
  }
  return absl::StrFormat("%s%u/ebbtide.sock", kOwnFolder, geteuid());
}

absl::Status CheckDefaultTarget(std::string_view target, Asked asked) {
  if (!target.starts_with(kOwnFolder)) return absl::OkStatus();
  const std::filesystem::path socket = target.substr(kUnix.size());
  const std::string folder = socket.parent_path().string();
  struct stat facts = {};
  if (lstat(folder.c_str(), &facts) != 0) {
    if (asked == Asked::kNobodyYet) return absl::OkStatus();  // Connecting says what is wrong.
    return absl::PermissionDeniedError(
        absl::StrFormat("%s: somebody answers, but the folder can't be looked at any more (%s), so "
                        "another user may have made it. Name the endpoint if it is to be trusted",
                        target, std::generic_category().message(errno)));
  }
  if (facts.st_uid == 0 || facts.st_uid == geteuid()) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrFormat(
      "%s: the folder belongs to uid %u, who may have put another socket there; this process runs "
      "as uid %u. Name the endpoint if it is to be trusted, or remove the folder",
      target, facts.st_uid, geteuid()));
}

}  // namespace ebbtide::client
