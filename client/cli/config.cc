// SPDX-License-Identifier: Apache-2.0
//
// `ebbctl config check`: asks the daemon's own parser, so that there is one and not two.

#include <array>
#include <string>

#include "base/status_macros.h"
#include "client/cli/daemon_process.h"
#include "client/cli/verbs.h"

namespace ebbtide::cli {

absl::StatusOr<bool> RunConfigCheck(const std::string& file) {
  const std::array<std::string, 3> arguments = {"--config", file, "--check-config"};
  EBBTIDE_ASSIGN_OR_RETURN(const int exit_code, RunDaemon(arguments));
  return exit_code == 0;
}

}  // namespace ebbtide::cli
