// SPDX-License-Identifier: Apache-2.0

#include "base/status_macros.h"

#include <cstdio>
#include <cstdlib>

namespace ebbtide {

void CheckFailed(const char* condition, const char* file, int line, const char* message) {
  std::fprintf(stderr, "%s:%d: broken contract: %s (%s)\n", file, line, message, condition);
  std::abort();
}

}  // namespace ebbtide
