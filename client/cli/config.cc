// SPDX-License-Identifier: Apache-2.0
//
// `ebbctl config check`: asks the daemon's own parser, so that there is one and not two.

#include <string>

#include "base/status_macros.h"
#include "client/cli/daemon_process.h"
#include "client/cli/verbs.h"

namespace ebbtide::cli {

absl::StatusOr<bool> RunConfigCheck(const std::string& file) {
  EBBTIDE_ASSIGN_OR_RETURN(const std::string daemon, FindDaemon());
  EBBTIDE_ASSIGN_OR_RETURN(
      const int exit_code,
      RunToEnd({.program = daemon, .arguments = {"--config", file, "--check-config"}}));
  return exit_code == 0;
}

}  // namespace ebbtide::cli
