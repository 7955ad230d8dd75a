// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/socket_claim.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/str_format.h"

#include "base/status_macros.h"

namespace ebbtide::service {
namespace {

absl::Status Failed(int error, std::string_view what, const std::string& path) {
  return absl::ErrnoToStatus(error, absl::StrFormat("%s %s", what, path));
}

// Only the last folder is made: a missing parent is more likely a misspelt path.
absl::Status MakeFolder(const std::string& folder) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return Failed(errno, "can't make the socket's folder", folder);
  }
  return absl::OkStatus();
}

// Whoever owns the folder can put another socket in the place of ours.
absl::Status CheckOwner(const std::string& folder, int fd) {
  struct stat info = {};
  if (::fstat(fd, &info) != 0) {
    return Failed(errno, "can't look at the socket's folder", folder);
  }
  const uid_t self = ::geteuid();
  if (self != 0 && info.st_uid != 0 && info.st_uid != self) {
    return absl::FailedPreconditionError(
        absl::StrFormat("the socket's folder %s belongs to uid %d, who could replace the socket; "
                        "this process runs as uid %d: choose another folder in server.listen",
                        folder, info.st_uid, self));
  }
  return absl::OkStatus();
}

std::string OwnerOf(int connected) {
  ucred owner = {};
  socklen_t size = sizeof owner;
  if (::getsockopt(connected, SOL_SOCKET, SO_PEERCRED, &owner, &size) != 0 || owner.pid == 0) {
    return "another process";
  }
  return absl::StrFormat("process %d of uid %d", owner.pid, owner.uid);
}

// OK where nobody listens at `path`.
absl::Status CheckNobodyListens(const std::string& path) {
  const int probe = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (probe < 0) {
    return Failed(errno, "can't make a socket to look at", path);
  }
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  const int result = ::connect(probe, reinterpret_cast<sockaddr*>(&address), sizeof address);
  const int error = result == 0 ? 0 : errno;
  const std::string owner = result == 0 ? OwnerOf(probe) : "another process";
  ::close(probe);
  if (error == ECONNREFUSED || error == ENOENT) {
    return absl::OkStatus();
  }
  // A full backlog (EAGAIN) is somebody's too.
  if (error == 0 || error == EAGAIN) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s is listened at by %s; stop it, or choose another server.listen", path, owner));
  }
  return Failed(error, "can't tell whether anybody listens at", path);
}

absl::Status ClearPlace(const std::string& path) {
  struct stat info = {};
  if (::lstat(path.c_str(), &info) != 0) {
    return errno == ENOENT ? absl::OkStatus() : Failed(errno, "can't look at", path);
  }
  if (!S_ISSOCK(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "%s exists and is not a socket; remove it, or choose another server.listen", path));
  }
  EBBTIDE_RETURN_IF_ERROR(CheckNobodyListens(path));
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return Failed(errno, "can't remove the dead socket", path);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SocketClaim> SocketClaim::Take(const std::string& path) {
  return TakeBy(LOCK_EX, path);
}

absl::StatusOr<SocketClaim> SocketClaim::TryTake(const std::string& path) {
  return TakeBy(LOCK_EX | LOCK_NB, path);
}

absl::StatusOr<SocketClaim> SocketClaim::TakeBy(int lock, const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path();
  EBBTIDE_RETURN_IF_ERROR(MakeFolder(folder));
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) {
    return Failed(errno, "can't open the socket's folder", folder);
  }
  SocketClaim claim(path, fd);
  EBBTIDE_RETURN_IF_ERROR(CheckOwner(folder, fd));
  // Claims are held for milliseconds, but whoever can open the folder can lock it.
  if (::flock(fd, lock) != 0) {
    if (errno == EWOULDBLOCK) {
      return absl::UnavailableError(
          absl::StrFormat("another process has locked the socket's folder %s", folder));
    }
    return Failed(errno, "can't lock the socket's folder", folder);
  }
  EBBTIDE_RETURN_IF_ERROR(ClearPlace(path));
  return claim;
}

SocketClaim::SocketClaim(SocketClaim&& other) noexcept
    : path_(std::move(other.path_)), folder_(std::exchange(other.folder_, -1)) {}

SocketClaim::~SocketClaim() {
  if (folder_ >= 0) {
    ::close(folder_);
  }
}

absl::Status SocketClaim::SetMode(unsigned mode) const {
  return ::chmod(path_.c_str(), mode) == 0 ? absl::OkStatus()
                                           : Failed(errno, "can't set the mode of", path_);
}

}  // namespace ebbtide::service
