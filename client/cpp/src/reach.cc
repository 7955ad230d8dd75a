// SPDX-License-Identifier: Apache-2.0

#include "client/cpp/src/reach.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"

namespace ebbtide::client {
namespace {

constexpr std::string_view kUnix = "unix:";
constexpr char kWhere[] = "name its endpoint with EBBTIDE_SOCKET or --socket";

absl::Status NoDaemon(const Unanswered& unanswered, const std::string& why,
                      const std::string& advice) {
  const std::string call = unanswered.is_first ? "" : unanswered.call + ": ";
  return absl::UnavailableError(
      absl::StrFormat("%sno daemon answers at %s: %s; %s", call, unanswered.target, why, advice));
}

absl::Status NobodyThere(const Unanswered& unanswered, const std::string& why) {
  return NoDaemon(unanswered, why, absl::StrFormat("start `ebbtided`, or %s", kWhere));
}

// gRPC says where before it says what: the last part is what.
std::string WhatOf(const std::string& said) {
  const size_t at = said.rfind(": ");
  return at == std::string::npos ? said : said.substr(at + 2);
}

absl::Status SomebodyThere(const Unanswered& unanswered) {
  const std::string what = WhatOf(unanswered.said);
  if (unanswered.is_first) return absl::UnavailableError(IsNoDaemon(unanswered.target, what));
  return NobodyThere(unanswered, absl::StrFormat("it ended, or the connection broke (%s)", what));
}

// 0 where somebody listens.
int ConnectErrno(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) return ENAMETOOLONG;
  std::copy(path.begin(), path.end(), address.sun_path);
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return errno;
  const int result = connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const int error = result == 0 ? 0 : errno;
  close(fd);
  return error == EAGAIN ? 0 : error;  // Its queue is full.
}

absl::Status Forbidden(const std::string& target, const std::string& path) {
  struct stat facts = {};
  if (stat(path.c_str(), &facts) != 0) {
    return absl::PermissionDeniedError(absl::StrFormat(
        "%s: this user (uid %u) may not look into the socket's folder; run as the daemon's user, "
        "or let it listen elsewhere (server.listen)",
        target, geteuid()));
  }
  return absl::PermissionDeniedError(absl::StrFormat(
      "%s: this user (uid %u) may not connect to a socket of uid %u with mode %04o; run as that "
      "user, or let its group in (server.socket_mode: \"0660\")",
      target, geteuid(), facts.st_uid, facts.st_mode & 07777U));
}

absl::Status OfSocket(const Unanswered& unanswered, const std::string& path) {
  const int error = ConnectErrno(path);
  struct stat facts = {};
  switch (error) {
    case 0:
      return SomebodyThere(unanswered);
    case ENOENT:
    case ENOTDIR:
      return NobodyThere(unanswered, "there is no such socket");
    case EACCES:
    case EPERM:
      return Forbidden(unanswered.target, path);
    case ECONNREFUSED:
      if (stat(path.c_str(), &facts) == 0 && !S_ISSOCK(facts.st_mode)) {
        return NobodyThere(unanswered, "that is no socket");
      }
      return NobodyThere(unanswered, "nobody listens at that socket any more");
    default:  // Too many files of ours, links in a ring, a socket of another kind.
      return NobodyThere(unanswered, absl::StrFormat("it can't be looked at: %s",
                                                     std::generic_category().message(error)));
  }
}

}  // namespace

absl::Status WhyUnreachable(const Unanswered& unanswered) {
  const std::string& target = unanswered.target;
  if (target.starts_with(kUnix)) return OfSocket(unanswered, target.substr(kUnix.size()));
  if (absl::StrContains(unanswered.said, "DNS resolution failed")) {
    return NobodyThere(unanswered, "there is no such host");
  }
  if (absl::StrContains(unanswered.said, "Connection refused")) {
    return NobodyThere(unanswered, "nobody listens there");
  }
  return SomebodyThere(unanswered);
}

std::string IsNoDaemon(std::string_view target, std::string_view why) {
  return absl::StrFormat(
      "no daemon answers at %s: who listens there is no ebbtided, or one that hangs (%s); %s",
      target, why, kWhere);
}

}  // namespace ebbtide::client
