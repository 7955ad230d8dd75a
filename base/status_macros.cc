// SPDX-License-Identifier: Apache-2.0

#include "base/status_macros.h"

#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_format.h"
#include "absl/time/time.h"

#include "base/background_writer.h"
#include "base/log.h"

namespace ebbtide {

void CheckFailed(const char* condition, const char* file, int line, const char* message) {
  constexpr absl::Duration kPatience = absl::Seconds(1);  // Whoever reads may be stuck.
  FlushLog(kPatience);
  WriteWithin(STDERR_FILENO,
              absl::StrFormat("%s:%d: broken contract: %s (%s)\n", file, line, message, condition),
              kPatience);
  std::abort();
}

}  // namespace ebbtide
