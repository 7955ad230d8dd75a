// SPDX-License-Identifier: Apache-2.0
//
// The daemon's program, found beside ebbctl: run once for its answer, or kept running for as long
// as this object lives. A daemon started here dies with ebbctl, however that ends.

#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ebbtide::cli {

// The path of `ebbtided` in the folder that holds this program, else in $PATH.
//   kNotFound  neither has it; names both
absl::StatusOr<std::string> FindDaemon();

// A program and its arguments.
struct CommandLine {
  std::string program;
  std::vector<std::string> arguments = {};
};

// Runs it to its end, on our own stdout and stderr, or with both in `output`. Its exit code;
// 128 + signal where it was killed; 127 where it can't be run.
absl::StatusOr<int> RunToEnd(const CommandLine& command, std::string* output = nullptr);

// Thread-compatible.
class DaemonProcess {
 public:
  // Starts it with stdout and stderr in `log_file`.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(const CommandLine& command,
                                                              const std::string& log_file);
  ~DaemonProcess();  // Kills what still runs.
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  // Whether it still runs; false once it ended.
  bool IsRunning();

  // Waits for it to end; whether it did.
  bool EndsWithin(absl::Duration timeout);

  // Ends it at once (SIGKILL), without waiting. From any thread.
  void Kill();

  // Asks it to end (SIGTERM) and waits.
  //   kDeadlineExceeded  it did not, and was killed
  //   kInternal          it ended with another exit code than 0
  absl::Status Stop(absl::Duration timeout);

 private:
  DaemonProcess(pid_t pid, int pid_fd) : pid_(pid), pid_fd_(pid_fd) {}
  const pid_t pid_;
  const int pid_fd_;  // Readable once it ended.
  bool has_ended_ = false;
  int exit_code_ = 0;
};

}  // namespace ebbtide::cli
