// SPDX-License-Identifier: Apache-2.0
//
// fork and exec, and a pidfd to wait on with a deadline.

#include "client/cli/daemon_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"

#include "base/clock.h"
#include "base/status_macros.h"

namespace ebbtide::cli {
namespace {

constexpr char kProgram[] = "ebbtided";
constexpr int kExitNotRun = 127;

bool IsProgram(const std::filesystem::path& path) {
  return access(path.c_str(), X_OK) == 0;
}

int ExitCode(int wait_status) {
  return WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 128 + WTERMSIG(wait_status);
}

absl::Status Failed(const char* what) {
  return absl::InternalError(
      absl::StrFormat("%s: %s failed: %s", kProgram, what, std::generic_category().message(errno)));
}

// Only calls that are safe between fork and exec. `log` < 0: our own stdout and stderr.
[[noreturn]] void BecomeDaemon(char* const* argv, pid_t parent, int log) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(kExitNotRun);  // The parent died before prctl.
  if (log >= 0) {
    setpgid(0, 0);  // Ctrl-C is ours to answer: the daemon is stopped in order.
    dup2(log, STDOUT_FILENO);
    dup2(log, STDERR_FILENO);
  }
  execv(argv[0], argv);
  _exit(kExitNotRun);
}

absl::StatusOr<pid_t> Spawn(const CommandLine& command, int log) {
  CommandLine owned = command;
  std::vector<char*> argv = {owned.program.data()};
  for (std::string& argument : owned.arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid < 0) return Failed("fork");
  if (pid == 0) BecomeDaemon(argv.data(), parent, log);
  return pid;
}

absl::StatusOr<int> RunInto(const CommandLine& command, int log) {
  EBBTIDE_ASSIGN_OR_RETURN(const pid_t pid, Spawn(command, log));
  int wait_status = 0;
  while (waitpid(pid, &wait_status, 0) < 0) {
    if (errno != EINTR) return Failed("waitpid");
  }
  return ExitCode(wait_status);
}

// Of a file in memory.
std::string Contents(int file) {
  std::string text;
  std::array<char, 4096> part = {};
  for (ssize_t got = 0;
       (got = pread(file, part.data(), part.size(), static_cast<off_t>(text.size()))) > 0;) {
    text.append(part.data(), static_cast<size_t>(got));
  }
  return text;
}

}  // namespace

absl::StatusOr<std::string> FindDaemon() {
  std::error_code error;
  const std::filesystem::path folder =
      std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  if (IsProgram(folder / kProgram)) return (folder / kProgram).string();
  const char* path = std::getenv("PATH");  // NOLINT(concurrency-mt-unsafe): nobody sets it
  for (const auto part : absl::StrSplit(path == nullptr ? "" : path, ':', absl::SkipEmpty())) {
    const auto program = std::filesystem::path(std::string(part)) / kProgram;
    if (IsProgram(program)) return program.string();
  }
  return absl::NotFoundError(absl::StrFormat(
      "no %s in %s nor in $PATH; build it (cmake --build --preset release --target %s) or install "
      "it beside ebbctl",
      kProgram, folder.string(), kProgram));
}

absl::StatusOr<int> RunToEnd(const CommandLine& command, std::string* output) {
  if (output == nullptr) return RunInto(command, -1);
  const int file = memfd_create("output", MFD_CLOEXEC);
  if (file < 0) return Failed("memfd_create");
  absl::StatusOr<int> exit_code = RunInto(command, file);
  *output = Contents(file);
  close(file);
  return exit_code;
}

absl::StatusOr<std::unique_ptr<DaemonProcess>> DaemonProcess::Start(const CommandLine& command,
                                                                    const std::string& log_file) {
  const int log = open(log_file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (log < 0) return Failed("opening its log file");
  const absl::StatusOr<pid_t> pid = Spawn(command, log);
  close(log);
  EBBTIDE_RETURN_IF_ERROR(pid.status());
  // glibc 2.36 has pidfd_open only behind a header that clashes with fcntl.h's names.
  const int pid_fd = static_cast<int>(syscall(SYS_pidfd_open, *pid, 0));
  if (pid_fd < 0) {
    kill(*pid, SIGKILL);
    waitpid(*pid, nullptr, 0);
    return Failed("pidfd_open");
  }
  return std::unique_ptr<DaemonProcess>(new DaemonProcess(*pid, pid_fd));
}

DaemonProcess::~DaemonProcess() {
  if (IsRunning()) {
    kill(pid_, SIGKILL);
    EndsWithin(absl::InfiniteDuration());
  }
  close(pid_fd_);
}

bool DaemonProcess::IsRunning() {
  return !EndsWithin(absl::ZeroDuration());
}

void DaemonProcess::Kill() {
  syscall(SYS_pidfd_send_signal, pid_fd_, SIGKILL, nullptr, 0);
}

absl::Status DaemonProcess::Stop(absl::Duration timeout) {
  if (!has_ended_) kill(pid_, SIGTERM);
  if (!EndsWithin(timeout)) {
    kill(pid_, SIGKILL);
    EndsWithin(absl::InfiniteDuration());
    return absl::DeadlineExceededError(
        absl::StrFormat("%s (process %d) did not end within %s of SIGTERM and was killed", kProgram,
                        pid_, absl::FormatDuration(timeout)));
  }
  if (exit_code_ != 0) {
    return absl::InternalError(
        absl::StrFormat("%s (process %d) ended with exit code %d", kProgram, pid_, exit_code_));
  }
  return absl::OkStatus();
}

bool DaemonProcess::EndsWithin(absl::Duration timeout) {
  if (has_ended_) return true;
  pollfd ended = {.fd = pid_fd_, .events = POLLIN, .revents = 0};
  const absl::Duration deadline = SteadyClock().SinceStart() + timeout;
  while (true) {  // A signal ends poll early.
    const absl::Duration left = deadline - SteadyClock().SinceStart();
    const int timeout_ms =
        timeout == absl::InfiniteDuration()
            ? -1
            : static_cast<int>(absl::ToInt64Milliseconds(std::max(left, absl::ZeroDuration())));
    const int ready = poll(&ended, 1, timeout_ms);
    if (ready > 0) break;
    if (ready == 0 || errno != EINTR) return false;
  }
  int wait_status = 0;
  if (waitpid(pid_, &wait_status, 0) == pid_) exit_code_ = ExitCode(wait_status);
  has_ended_ = true;
  return true;
}

}  // namespace ebbtide::cli
