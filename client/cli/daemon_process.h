// SPDX-License-Identifier: Apache-2.0
//
// The daemon's program, found beside ebbctl: run once for its answer, or kept running for as long
// as this object lives. A daemon started here dies with ebbctl, however that ends.

#pragma once

#include <sys/types.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace ebbtide::cli {

// The path of `ebbtided` in the folder that holds this program, else in $PATH.
//   kNotFound  neither has it; names both
absl::StatusOr<std::string> FindDaemon();

// Runs it to its end, on our own stdout and stderr. Its exit code; 128 + signal where it was
// killed.
absl::StatusOr<int> RunDaemon(std::span<const std::string> arguments);

// Thread-compatible.
class DaemonProcess {
 public:
  // Starts it with stdout and stderr in `log_file`.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(
      std::span<const std::string> arguments, const std::string& log_file);
  ~DaemonProcess();  // Kills what still runs.
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  // Whether it still runs; false once it ended.
  bool IsRunning();

  // Asks it to end (SIGTERM) and waits.
  //   kDeadlineExceeded  it did not, and was killed
  //   kInternal          it ended with another exit code than 0
  absl::Status Stop(absl::Duration timeout);

 private:
  DaemonProcess(pid_t pid, int pid_fd) : pid_(pid), pid_fd_(pid_fd) {}
  bool WaitForEnd(absl::Duration timeout);

  const pid_t pid_;
  const int pid_fd_;  // Readable once it ended.
  bool has_ended_ = false;
  int exit_code_ = 0;
};

}  // namespace ebbtide::cli
