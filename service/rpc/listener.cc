// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/listener.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <span>
#include <utility>

#include "absl/strings/str_format.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "service/config/listen.h"

namespace ebbtide::service {
namespace {

constexpr int kBacklog = 4096;  // The system's limit is lower, mostly.
constexpr int kPauseMs = 100;   // Where a connection can't be taken now.
constexpr int kPortsTried = 16;
constexpr absl::Duration kRefusing = absl::Seconds(5);
constexpr absl::Duration kLookEach = absl::Seconds(1);

union Address {
  sockaddr_un un;  // First, as the longest: "= {}" clears no more than the first.
  sockaddr any;
  sockaddr_in in;
  sockaddr_in6 in6;  // The port lies where that of IPv4 does.
};

absl::Status CantListen(int error, const ListenConfig& place) {
  return absl::ErrnoToStatus(error, absl::StrFormat("can't listen at %s", FormatListen(place)));
}

Address AddressOf(const std::string& host, uint16_t port) {
  Address address = {};
  const bool is_v4 = ::inet_pton(AF_INET, host.c_str(), &address.in.sin_addr) == 1;
  if (!is_v4) ::inet_pton(AF_INET6, host.c_str(), &address.in6.sin6_addr);
  address.any.sa_family = is_v4 ? AF_INET : AF_INET6;
  address.in.sin_port = htons(port);
  return address;
}

socklen_t SizeOf(const Address& address) {
  const auto family = address.any.sa_family;
  return family == AF_UNIX   ? sizeof address.un
         : family == AF_INET ? sizeof address.in
                             : sizeof address.in6;
}

// A socket that listens at `address`; -1, with the reason in errno, where none can.
int ListenAt(const Address& address) {
  const int fd = ::socket(address.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  bool is_set = true;
  constexpr int kYes = 1;
  if (address.any.sa_family == AF_UNIX) {
    is_set = ::fchmod(fd, 0600) == 0;  // Its file is made with the socket's own mode, if not less.
  } else {
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &kYes, sizeof kYes);  // Connections that ended.
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &kYes, sizeof kYes);  // Inherited by connections.
  }
  if (is_set && ::bind(fd, &address.any, SizeOf(address)) == 0 && ::listen(fd, kBacklog) == 0) {
    return fd;
  }
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

uint16_t PortOf(int socket) {
  Address address = {};
  socklen_t size = sizeof address;
  ::getsockname(socket, &address.any, &size);
  return ntohs(address.in.sin_port);
}

bool IsForFiles(int fd) {
  rlimit limit = {};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
         static_cast<rlim_t>(fd) >= limit.rlim_cur / 4 * 3;
}

}  // namespace

Listener::Listener(const ListenConfig& place)
    : end_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), place_(place) {}

absl::StatusOr<std::unique_ptr<Listener>> Listener::Open(const ListenConfig& place) {
  // No make_unique: the constructor is private.
  std::unique_ptr<Listener> listener(new Listener(place));
  if (listener->end_ < 0) return absl::ErrnoToStatus(errno, "can't make an eventfd");
  if (place.socket_path.empty()) {
    EBBTIDE_RETURN_IF_ERROR(listener->BindPorts());
    return listener;
  }
  EBBTIDE_ASSIGN_OR_RETURN(const SocketClaim claim, SocketClaim::Take(place.socket_path));
  EBBTIDE_ASSIGN_OR_RETURN(const int socket, listener->BindSocket(claim));
  listener->sockets_ = {socket};
  return listener;
}

absl::StatusOr<int> Listener::BindSocket(const SocketClaim& claim) {
  Address address = {};
  address.un.sun_family = AF_UNIX;
  place_.socket_path.copy(address.un.sun_path, sizeof address.un.sun_path - 1);
  const int socket = ListenAt(address);
  if (socket < 0) return CantListen(errno, place_);
  absl::Status failed = claim.SetMode(place_.socket_mode);
  struct stat info = {};
  if (failed.ok() && ::lstat(place_.socket_path.c_str(), &info) != 0) {
    failed = CantListen(errno, place_);
  }
  if (!failed.ok()) {
    ::unlink(place_.socket_path.c_str());
    ::close(socket);
    return failed;
  }
  device_ = info.st_dev;
  inode_ = info.st_ino;
  return socket;
}

// A port that is free at one address may be in use at the next: where any will do, others are
// tried.
absl::Status Listener::BindPorts() {
  const uint16_t port = place_.port;
  absl::Status bound;
  for (int i = 0; i < kPortsTried; ++i) {
    bound = BindAddresses();
    if (bound.ok() || port != 0) break;
    CloseSockets();
    place_.port = 0;
  }
  return bound;
}

// "localhost" is both loopbacks, whatever the machine's files say of it (RFC 6761); one that this
// machine lacks is passed over.
absl::Status Listener::BindAddresses() {
  const bool is_both = place_.host == "localhost";
  absl::Status lacking;
  for (const std::string& host :
       is_both ? std::vector<std::string>{"127.0.0.1", "::1"} : std::vector{place_.host}) {
    const int socket = ListenAt(AddressOf(host, place_.port));
    if (socket >= 0) {
      sockets_.push_back(socket);
      place_.port = PortOf(socket);
      continue;
    }
    const int error = errno;
    lacking = CantListen(error, {.socket_path = "", .host = host, .port = place_.port});
    if (error != EADDRNOTAVAIL && error != EAFNOSUPPORT) return lacking;
  }
  return sockets_.empty() ? lacking : absl::OkStatus();
}

Listener::~Listener() {
  Close();
  if (end_ >= 0) ::close(end_);
}

void Listener::Close() {
  if (thread_.joinable()) {
    ::eventfd_write(end_, 1);
    thread_.join();
  }
  if (IsSocketOurs()) ::unlink(place_.socket_path.c_str());
  CloseSockets();
}

void Listener::CloseSockets() {
  for (const int socket : std::exchange(sockets_, {})) ::close(socket);
  inode_ = 0;
}

// The system gives the lowest number that is free, so there are no more than were ever in use.
void Listener::HangUp() const {
  for (int fd = 0; fd <= highest_; ++fd) {
    if (IsConnectionHere(fd)) ::shutdown(fd, SHUT_RDWR);
  }
}

// A connection has the address of the socket that it was accepted from.
bool Listener::IsConnectionHere(int fd) const {
  Address address = {};
  socklen_t size = sizeof address;
  if (::getsockname(fd, &address.any, &size) != 0) return false;
  if (place_.socket_path.empty()) {
    return (address.any.sa_family == AF_INET || address.any.sa_family == AF_INET6) &&
           ntohs(address.in.sin_port) == place_.port;
  }
  return address.any.sa_family == AF_UNIX && place_.socket_path == address.un.sun_path;
}

bool Listener::IsSocketOurs() const {
  struct stat info = {};
  return inode_ != 0 && ::lstat(place_.socket_path.c_str(), &info) == 0 && info.st_dev == device_ &&
         info.st_ino == inode_;
}

absl::Status Listener::status() const {
  const absl::MutexLock lock(&mu_);
  if (!listening_.ok()) return listening_;
  const bool is_refusing = SteadyClock().SinceStart() - refused_at_ < kRefusing;
  return is_refusing ? absl::UnavailableError(why_refused_) : absl::OkStatus();
}

void Listener::Accept(Take take) {
  thread_ = std::thread([this, take = std::move(take)] {
    ::pthread_setname_np(::pthread_self(), "ebbtide-accept");
    Run(take);
  });
}

void Listener::Run(const Take& take) {
  absl::Duration next_look = SteadyClock().SinceStart() + kLookEach;
  pollfd end = {.fd = end_, .events = POLLIN, .revents = 0};
  while (end.revents == 0) {
    try {
      std::vector<pollfd> ready = {end};
      for (const int socket : sockets_) {
        ready.push_back({.fd = socket, .events = POLLIN, .revents = 0});
      }
      const absl::Duration rest = next_look - SteadyClock().SinceStart();
      ::poll(ready.data(), ready.size(),
             static_cast<int>(absl::ToInt64Milliseconds(std::max(rest, absl::ZeroDuration()))) + 1);
      end = ready.front();
      for (const pollfd& socket : std::span(ready).subspan(1)) {
        if (end.revents == 0 && socket.revents != 0) AcceptFrom(socket.fd, take);
      }
      if (end.revents != 0 || SteadyClock().SinceStart() < next_look) continue;
      next_look = SteadyClock().SinceStart() + kLookEach;
      LookAfterSocket();
    } catch (const std::bad_alloc&) {
      ::poll(&end, 1, kPauseMs);  // There may be memory by then.
    }
  }
}

// gRPC may throw before it owns the connection, or once it does and closes it at its keepalive: a
// second close could be of a file that has the number by then. Hung up it is over for its client
// either way; at worst its number stays in use.
void Listener::HandOver(int connection, const Take& take) {
  try {
    take(connection);
  } catch (const std::bad_alloc&) {
    ::shutdown(connection, SHUT_RDWR);
    RefuseForAWhile("there was no memory to take a connection");
  }
}

// One connection; others are still there at the next poll.
void Listener::AcceptFrom(int socket, const Take& take) {
  const int connection = ::accept4(socket, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  const int error = errno;
  if (connection < 0 && (error == EAGAIN || error == EINTR || error == ECONNABORTED)) return;
  if (connection < 0) {
    RefuseForAWhile(absl::StrFormat("connections can't be taken: %s", ::strerror(error)));
  } else if (IsForFiles(connection)) {
    ::close(connection);
    NoteRefused("the descriptors that connections may have are all in use");
  } else {
    highest_ = std::max(highest_, connection);
    {
      const absl::MutexLock lock(&mu_);
      refused_at_ = -absl::InfiniteDuration();
    }
    HandOver(connection, take);
  }
}

void Listener::RefuseForAWhile(const std::string& why) {
  NoteRefused(why);
  pollfd end = {.fd = end_, .events = POLLIN, .revents = 0};
  ::poll(&end, 1, kPauseMs);
}

void Listener::NoteRefused(const std::string& why) {
  const absl::MutexLock lock(&mu_);
  refused_at_ = SteadyClock().SinceStart();
  why_refused_ = why;
}

void Listener::LookAfterSocket() {
  const bool is_gone = !place_.socket_path.empty() && !IsSocketOurs();
  absl::Status listening = is_gone ? ListenAnew() : absl::OkStatus();
  const absl::MutexLock lock(&mu_);
  listening_ = std::move(listening);
}

absl::Status Listener::ListenAnew() {
  EBBTIDE_ASSIGN_OR_RETURN(const SocketClaim claim, SocketClaim::TryTake(place_.socket_path));
  EBBTIDE_ASSIGN_OR_RETURN(const int socket, BindSocket(claim));
  ::close(std::exchange(sockets_.front(), socket));
  Log(LogLevel::kWarn, "the socket was gone; listening anew", {{"path", place_.socket_path}});
  return absl::OkStatus();
}

}  // namespace ebbtide::service
