// SPDX-License-Identifier: Apache-2.0
//
// A real ebbtided as a child process: started with an environment of its own, watched through its
// output, stopped by signals. It dies with the test.

#pragma once

#include <sys/types.h>

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace ebbtide::test {

struct DaemonSetup {
  std::filesystem::path program;
  std::vector<std::string> arguments;
  std::map<std::string, std::string> environment;  // All of it.
  std::filesystem::path stderr_file;
};

class DaemonProcess {
 public:
  explicit DaemonProcess(const DaemonSetup& setup);
  ~DaemonProcess();  // Kills it where it still runs.
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  pid_t pid() const { return pid_; }

  // The next line of its standard output; "" once it ends, or after thirty seconds.
  std::string ReadLine();
  // All that is left of its standard output, up to its end.
  std::string ReadAll();
  std::string ReadStderr() const;

  void Signal(int signal) const;

  // Its exit code, or 128 + the signal that killed it; fails the test after thirty seconds.
  int WaitForEnd();

 private:
  bool FillBuffer();  // False at the end.

  const std::filesystem::path stderr_file_;
  pid_t pid_ = -1;
  int pid_fd_ = -1;
  int stdout_fd_ = -1;
  std::string buffer_;
  std::optional<int> exit_code_;
};

}  // namespace ebbtide::test
