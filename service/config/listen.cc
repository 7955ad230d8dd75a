// SPDX-License-Identifier: Apache-2.0

#include "service/config/listen.h"

#include <arpa/inet.h>
#include <sys/un.h>

#include <algorithm>
#include <charconv>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"

namespace ebbtide::service {
namespace {

constexpr std::string_view kUnix = "unix:";
constexpr size_t kSocketPathBytesMax = sizeof(sockaddr_un::sun_path) - 1;
// gRPC reads an endpoint as a URI, and splits it at commas.
constexpr std::string_view kSocketPathSigns = "-._~!$&'()*+;=:@/";

bool IsLoopback(const std::string& host) {
  if (host == "localhost") {
    return true;
  }
  in_addr v4 = {};
  if (::inet_pton(AF_INET, host.c_str(), &v4) == 1) {
    return ntohl(v4.s_addr) >> 24 == 127;
  }
  in6_addr v6 = {};
  return ::inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

absl::StatusOr<ListenConfig> ParseSocket(std::string_view path) {
  if (path.empty() || path.front() != '/' || path.back() == '/') {
    return absl::InvalidArgumentError(absl::StrFormat(
        "'unix:%s' needs the absolute path of a file, as in unix:/run/ebbtide/ebbtide.sock", path));
  }
  if (path.size() > kSocketPathBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the socket's path has %d bytes, over the system's limit of %d; choose a "
                        "shorter one",
                        path.size(), kSocketPathBytesMax));
  }
  const auto sign = std::ranges::find_if(path, [](char c) {
    return !absl::ascii_isalnum(static_cast<unsigned char>(c)) &&
           kSocketPathSigns.find(c) == std::string_view::npos;
  });
  if (sign != path.end()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("'unix:%s' has '%s', and gRPC could not connect to it; choose a path of "
                        "letters, digits and %s",
                        path, absl::CHexEscape(std::string(1, *sign)), kSocketPathSigns));
  }
  ListenConfig listen;
  listen.socket_path = path;
  return listen;
}

}  // namespace

absl::StatusOr<ListenConfig> ParseListen(std::string_view text) {
  if (text.starts_with(kUnix)) {
    return ParseSocket(text.substr(kUnix.size()));
  }
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrFormat("'%s' is neither unix:/PATH nor HOST:PORT, as in 127.0.0.1:50051", text));
  }
  std::string_view host = text.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  }
  ListenConfig listen;
  listen.host = host;
  if (!IsLoopback(listen.host)) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "host '%s' is not loopback; the protocol is neither encrypted nor authenticated, so only "
        "127.0.0.1, [::1], localhost or a unix socket are listened at",
        host));
  }
  const std::string_view port = text.substr(colon + 1);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), listen.port);
  if (error != std::errc() || end != port.data() + port.size()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("port '%s' is not a number from 0 to 65535", port));
  }
  return listen;
}

std::string FormatListen(const ListenConfig& listen) {
  if (!listen.socket_path.empty()) {
    return std::string(kUnix) + listen.socket_path;
  }
  const bool is_v6 = listen.host.find(':') != std::string::npos;
  return absl::StrFormat("%s%s%s:%d", is_v6 ? "[" : "", listen.host, is_v6 ? "]" : "", listen.port);
}

}  // namespace ebbtide::service
