// SPDX-License-Identifier: Apache-2.0

#include "tests/support/daemon_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <fstream>
#include <sstream>

#include "gtest/gtest.h"

#include "base/status_macros.h"

namespace ebbtide::test {
namespace {

constexpr int kPatienceMs = 30'000;

bool IsReady(int fd) {
  pollfd ready = {.fd = fd, .events = POLLIN, .revents = 0};
  return ::poll(&ready, 1, kPatienceMs) == 1;
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

DaemonProcess::DaemonProcess(const DaemonSetup& setup) : stderr_file_(setup.stderr_file) {
  std::vector<std::string> arguments = setup.arguments;
  arguments.insert(arguments.begin(), setup.program.string());
  std::vector<std::string> environment;
  for (const auto& [name, value] : setup.environment) environment.push_back(name + "=" + value);
  environment.emplace_back("CUDA_VISIBLE_DEVICES=-1");  // Whatever this machine has.
  const std::vector<char*> argv = Pointers(arguments);
  const std::vector<char*> envp = Pointers(environment);
  std::array<int, 2> out = {};
  EBBTIDE_CHECK(::pipe2(out.data(), O_CLOEXEC) == 0, "a pipe is made");
  const int err = ::open(stderr_file_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  EBBTIDE_CHECK(err >= 0, "the file for standard error opens");
  pid_ = ::fork();
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::dup2(out[1], STDOUT_FILENO);
    ::dup2(err, STDERR_FILENO);
    ::execve(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  EBBTIDE_CHECK(pid_ > 0, "fork succeeds");
  ::close(out[1]);
  ::close(err);
  stdout_fd_ = out[0];
  pid_fd_ = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
  EBBTIDE_CHECK(pid_fd_ >= 0, "pidfd_open succeeds");
}

DaemonProcess::~DaemonProcess() {
  if (!exit_code_.has_value()) {
    Signal(SIGKILL);
    WaitForEnd();
  }
  ::close(pid_fd_);
  ::close(stdout_fd_);
}

bool DaemonProcess::FillBuffer() {
  std::array<char, 4096> bytes;
  if (!IsReady(stdout_fd_)) {
    ADD_FAILURE() << "no output for " << kPatienceMs << " ms; its log:\n" << ReadStderr();
    return false;
  }
  const ssize_t count = ::read(stdout_fd_, bytes.data(), bytes.size());
  if (count > 0) buffer_.append(bytes.data(), static_cast<size_t>(count));
  return count > 0;
}

std::string DaemonProcess::ReadLine() {
  while (buffer_.find('\n') == std::string::npos) {
    if (!FillBuffer()) return "";
  }
  const size_t end = buffer_.find('\n');
  const std::string line = buffer_.substr(0, end);
  buffer_.erase(0, end + 1);
  return line;
}

std::string DaemonProcess::ReadAll() {
  while (FillBuffer()) {
  }
  return std::exchange(buffer_, "");
}

std::string DaemonProcess::ReadStderr() const {
  std::ifstream file(stderr_file_);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

void DaemonProcess::Signal(int signal) const {
  ::kill(pid_, signal);
}

int DaemonProcess::WaitForEnd() {
  if (exit_code_.has_value()) return *exit_code_;
  if (!IsReady(pid_fd_)) {
    ADD_FAILURE() << "still runs after " << kPatienceMs << " ms; its log:\n" << ReadStderr();
    Signal(SIGKILL);
  }
  int status = 0;
  ::waitpid(pid_, &status, 0);
  exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return *exit_code_;
}

}  // namespace ebbtide::test
