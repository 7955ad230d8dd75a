// SPDX-License-Identifier: Apache-2.0

#include "tests/support/disk_use.h"

#include <sys/stat.h>

#include <system_error>

namespace ebbtide::test {
namespace {

uint64_t BlocksOf(const std::filesystem::path& path) {
  struct stat status = {};
  return lstat(path.c_str(), &status) == 0 ? static_cast<uint64_t>(status.st_blocks) * 512 : 0;
}

}  // namespace

uint64_t DiskUseBytes(const std::filesystem::path& folder) {
  uint64_t bytes = BlocksOf(folder);
  std::error_code error;
  for (std::filesystem::recursive_directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    bytes += BlocksOf(it->path());
  }
  return bytes;
}

}  // namespace ebbtide::test
