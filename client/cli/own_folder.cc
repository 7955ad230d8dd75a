// SPDX-License-Identifier: Apache-2.0
//
// The guard shares nothing with the program that could end or hold up either: no session, no
// signal, no file.

#include "client/cli/own_folder.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_format.h"

namespace ebbtide::cli {
namespace {

constexpr char kGuardName[] = "ebbctl-guard";

// Until it is gone, for ten seconds at most: whoever wrote in it may take a moment to die.
void Remove(const std::string& path) {
  std::error_code error;
  for (int i = 0; i < 1000; ++i) {
    std::filesystem::remove_all(path, error);
    if (!error && !std::filesystem::exists(path, error)) return;
    poll(nullptr, 0, 10);
  }
}

// `program` is readable once that process has ended. By then what it started has been told to end
// (daemon_process.h): the kernel does that first.
[[noreturn]] void Guard(const std::string& path, int program) {
  setsid();
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_SETMASK, &all, nullptr);
  prctl(PR_SET_NAME, kGuardName);
  // Whoever reads the program's output waits until nobody can write any more.
  const int watched = dup2(program, 0);
  close_range(1, ~0U, 0);
  if (chdir("/") != 0 || watched != 0) _exit(1);
  pollfd ended = {.fd = watched, .events = POLLIN, .revents = 0};
  while (poll(&ended, 1, -1) < 0 && errno == EINTR) {
  }
  Remove(path);
  _exit(0);
}

absl::StatusOr<pid_t> StartGuard(const std::string& path) {
  const int program = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0));
  const pid_t guard = program < 0 ? -1 : fork();
  const int error = errno;
  if (guard == 0) Guard(path, program);
  if (program >= 0) close(program);
  if (guard > 0) return guard;
  return absl::UnavailableError(
      absl::StrFormat("no process can be made that removes %s at the end: %s", path,
                      std::generic_category().message(error)));
}

}  // namespace

absl::StatusOr<OwnFolder> OwnFolder::Make(const std::string& prefix) {
  std::error_code error;
  std::string path = (std::filesystem::temp_directory_path(error) / (prefix + "-XXXXXX")).string();
  if (error || mkdtemp(path.data()) == nullptr) {
    return absl::UnavailableError(absl::StrFormat(
        "no folder of its own can be made as %s; set TMPDIR to one that takes files", path));
  }
  const absl::StatusOr<pid_t> guard = StartGuard(path);
  if (guard.ok()) return OwnFolder(std::move(path), *guard);
  std::filesystem::remove(path, error);
  return guard.status();
}

OwnFolder::OwnFolder(OwnFolder&& other) noexcept
    : path_(std::move(other.path_)), guard_(std::exchange(other.guard_, -1)) {}

OwnFolder::~OwnFolder() {
  if (guard_ < 0) return;
  Remove(path_);
  kill(guard_, SIGKILL);
  while (waitpid(guard_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

}  // namespace ebbtide::cli
