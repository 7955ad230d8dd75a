// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/listener.h"

#include <netdb.h>
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

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"

#include "base/clock.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "service/config/listen.h"
#include "service/rpc/socket_claim.h"

namespace ebbtide::service {
namespace {

constexpr int kBacklog = 4096;  // The system's limit is lower, mostly.
constexpr int kPauseMs = 100;   // Where a connection can't be taken now.
constexpr absl::Duration kRefusing = absl::Seconds(5);

// New files are this user's alone for as long as this lives. The mask is the whole process's.
class PrivateFiles {
 public:
  PrivateFiles() : before_(::umask(0177)) {}
  ~PrivateFiles() { ::umask(before_); }
  PrivateFiles(const PrivateFiles&) = delete;
  PrivateFiles& operator=(const PrivateFiles&) = delete;

 private:
  mode_t before_;
};

// A socket that listens at `address`.
absl::StatusOr<int> ListenAt(const ListenConfig& place, const sockaddr* address, socklen_t size) {
  const int fd = ::socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  constexpr int kYes = 1;
  if (fd >= 0 && address->sa_family != AF_UNIX) {
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &kYes, sizeof kYes);  // Connections that ended.
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &kYes, sizeof kYes);  // Inherited by connections.
  }
  if (fd >= 0 && ::bind(fd, address, size) == 0 && ::listen(fd, kBacklog) == 0) return fd;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  return absl::ErrnoToStatus(error, absl::StrFormat("can't listen at %s", FormatListen(place)));
}

uint16_t PortOf(int socket) {
  sockaddr_in6 address = {};  // The port lies where that of IPv4 does.
  socklen_t size = sizeof address;
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.sin6_port);
}

bool IsForFiles(int fd) {
  rlimit limit = {};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
         static_cast<rlim_t>(fd) >= limit.rlim_cur / 4 * 3;
}

}  // namespace

Listener::Listener(const ListenConfig& place)
    : place_(place), wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

absl::StatusOr<std::unique_ptr<Listener>> Listener::Open(const ListenConfig& place) {
  // No make_unique: the constructor is private.
  std::unique_ptr<Listener> listener(new Listener(place));
  if (listener->wake_ < 0) return absl::ErrnoToStatus(errno, "can't make an eventfd");
  if (place.socket_path.empty()) {
    EBBTIDE_RETURN_IF_ERROR(listener->BindPorts());
    return listener;
  }
  EBBTIDE_ASSIGN_OR_RETURN(const int socket, listener->BindSocket());
  listener->sockets_ = {socket};
  return listener;
}

absl::StatusOr<int> Listener::BindSocket() {
  EBBTIDE_ASSIGN_OR_RETURN(const SocketClaim claim, SocketClaim::Take(place_.socket_path));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  place_.socket_path.copy(address.sun_path, sizeof address.sun_path - 1);
  const auto bind = [&]() -> absl::StatusOr<int> {
    const PrivateFiles private_files;
    return ListenAt(place_, reinterpret_cast<sockaddr*>(&address), sizeof address);
  };
  EBBTIDE_ASSIGN_OR_RETURN(const int socket, bind());
  struct stat info = {};
  ::lstat(place_.socket_path.c_str(), &info);
  device_ = info.st_dev;
  inode_ = info.st_ino;
  if (const absl::Status mode = claim.SetMode(place_.socket_mode); !mode.ok()) {
    ::close(socket);
    return mode;
  }
  return socket;
}

// At every address of the host that this machine has.
absl::Status Listener::BindPorts() {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const std::string port = absl::StrFormat("%d", place_.port);
  int error = ::getaddrinfo(place_.host.c_str(), port.c_str(), &hints, &found);
  // A machine that names nothing has a loopback all the same (RFC 6761).
  if (error != 0 && place_.host == "localhost")
    error = ::getaddrinfo("127.0.0.1", port.c_str(), &hints, &found);
  if (error != 0) {
    return absl::UnavailableError(
        absl::StrFormat("can't listen at %s: %s", FormatListen(place_), ::gai_strerror(error)));
  }
  absl::Status failed;
  for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
    // The port lies where that of IPv4 does.
    reinterpret_cast<sockaddr_in*>(at->ai_addr)->sin_port = htons(place_.port);
    const absl::StatusOr<int> socket = ListenAt(place_, at->ai_addr, at->ai_addrlen);
    if (socket.ok()) {
      sockets_.push_back(*socket);
      place_.port = PortOf(*socket);
    } else {
      failed = socket.status();
    }
  }
  ::freeaddrinfo(found);
  return sockets_.empty() ? failed : absl::OkStatus();
}

Listener::~Listener() {
  Close();
  if (wake_ >= 0) ::close(wake_);
}

void Listener::Close() {
  if (thread_.joinable()) {
    {
      const absl::MutexLock lock(&mu_);
      is_over_ = true;
    }
    Wake();
    thread_.join();
  }
  if (IsSocketOurs()) ::unlink(place_.socket_path.c_str());
  for (const int socket : std::exchange(sockets_, {})) ::close(socket);
  const absl::MutexLock lock(&mu_);
  if (next_socket_ >= 0) ::close(std::exchange(next_socket_, -1));
}

void Listener::HangUp() const {
  std::error_code error;
  for (std::filesystem::directory_iterator it("/proc/self/fd", error), end; !error && it != end;
       it.increment(error)) {
    int fd = -1;
    if (absl::SimpleAtoi(it->path().filename().string(), &fd) && IsConnectionHere(fd)) {
      ::shutdown(fd, SHUT_RDWR);
    }
  }
}

// A connection has the address of the socket that it was accepted from.
bool Listener::IsConnectionHere(int fd) const {
  union {
    sockaddr any;
    sockaddr_un un;
    sockaddr_in6 in6;
  } address = {};
  socklen_t size = sizeof address;
  if (::getsockname(fd, &address.any, &size) != 0) return false;
  if (place_.socket_path.empty()) {
    return (address.any.sa_family == AF_INET || address.any.sa_family == AF_INET6) &&
           ntohs(address.in6.sin6_port) == place_.port;
  }
  return address.any.sa_family == AF_UNIX && place_.socket_path == address.un.sun_path;
}

bool Listener::IsSocketOurs() const {
  struct stat info = {};
  return inode_ != 0 && ::lstat(place_.socket_path.c_str(), &info) == 0 && info.st_dev == device_ &&
         info.st_ino == inode_;
}

absl::Status Listener::Refresh() {
  if (!place_.socket_path.empty() && !IsSocketOurs()) {
    EBBTIDE_ASSIGN_OR_RETURN(const int socket, BindSocket());
    {
      const absl::MutexLock lock(&mu_);
      if (next_socket_ >= 0) ::close(next_socket_);
      next_socket_ = socket;
    }
    Wake();
    Log(LogLevel::kWarn, "the socket was gone; listening anew", {{"path", place_.socket_path}});
  }
  const absl::MutexLock lock(&mu_);
  const bool is_refusing = SteadyClock().SinceStart() - refused_at_ < kRefusing;
  return is_refusing ? absl::UnavailableError(why_refused_) : absl::OkStatus();
}

void Listener::Accept(Take take) {
  thread_ = std::thread([this, take = std::move(take)] {
    ::pthread_setname_np(::pthread_self(), "ebbtide-accept");
    Run(take);
  });
}

void Listener::Wake() const {
  ::eventfd_write(wake_, 1);
}

void Listener::Run(const Take& take) {
  while (true) {
    std::vector<pollfd> ready = {{.fd = wake_, .events = POLLIN, .revents = 0}};
    for (const int socket : sockets_) {
      ready.push_back({.fd = socket, .events = POLLIN, .revents = 0});
    }
    ::poll(ready.data(), ready.size(), -1);
    {
      const absl::MutexLock lock(&mu_);
      if (is_over_) return;
      if (next_socket_ >= 0) {
        eventfd_t ignored = 0;
        ::eventfd_read(wake_, &ignored);
        for (const int socket : sockets_) ::close(socket);
        sockets_ = {std::exchange(next_socket_, -1)};
        continue;
      }
    }
    for (const pollfd& socket : ready) {
      if (socket.fd != wake_ && socket.revents != 0) AcceptFrom(socket.fd, take);
    }
  }
}

// One connection; others are still there at the next poll.
void Listener::AcceptFrom(int socket, const Take& take) {
  const int connection = ::accept4(socket, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  const int error = errno;
  if (connection < 0 && (error == EAGAIN || error == EINTR || error == ECONNABORTED)) return;
  if (connection < 0) {
    NoteRefused(absl::StrFormat("connections can't be taken: %s", ::strerror(error)));
    pollfd wake = {.fd = wake_, .events = POLLIN, .revents = 0};
    ::poll(&wake, 1, kPauseMs);
  } else if (IsForFiles(connection)) {
    ::close(connection);
    NoteRefused("the descriptors that connections may have are all in use");
  } else {
    take(connection);
    const absl::MutexLock lock(&mu_);
    refused_at_ = -absl::InfiniteDuration();
  }
}

void Listener::NoteRefused(const std::string& why) {
  const absl::MutexLock lock(&mu_);
  refused_at_ = SteadyClock().SinceStart();
  why_refused_ = why;
}

}  // namespace ebbtide::service
