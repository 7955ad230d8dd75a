// SPDX-License-Identifier: Apache-2.0

#include "base/standard_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <initializer_list>

namespace ebbtide {

void OpenStandardFiles() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) >= 0) continue;
    // The lowest number that is free is this one.
    if (::open("/dev/null", O_RDONLY) != fd) std::abort();
  }
}

}  // namespace ebbtide
