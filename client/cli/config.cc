// SPDX-License-Identifier: Apache-2.0
//
// `ebbctl config check`: asks the daemon's own parser, so that there is one and not two.

#include <string>

#include "absl/strings/str_format.h"

#include "base/status_macros.h"
#include "client/cli/daemon_process.h"
#include "client/cli/verbs.h"

namespace ebbtide::cli {
namespace {

constexpr int kExitMistakes = 2;  // The daemon's (service/main.cc).

}  // namespace

absl::StatusOr<bool> RunConfigCheck(const std::string& file) {
  EBBTIDE_ASSIGN_OR_RETURN(const std::string daemon, FindDaemon());
  EBBTIDE_ASSIGN_OR_RETURN(
      const int exit_code,
      RunToEnd({.program = daemon, .arguments = {"--config", file, "--check-config"}}));
  if (exit_code == kExitMistakes) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: mistakes, each in a line above", file));
  }
  return exit_code == 0;
}

}  // namespace ebbtide::cli
