// SPDX-License-Identifier: Apache-2.0

#include "service/config/surroundings.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "base/executor.h"

namespace ebbtide::service {
namespace {

namespace fs = std::filesystem;

// The XDG base directory specification has relative paths ignored.
std::string AbsolutePathFrom(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && value[0] == '/' ? value : "";
}

std::string FolderFrom(const char* variable) {
  std::string path = AbsolutePathFrom(variable);
  std::error_code error;
  return fs::is_directory(path, error) ? path : "";
}

uint64_t BytesIn(const fs::path& folder) {
  uint64_t bytes = 0;
  std::error_code error;
  for (fs::recursive_directory_iterator it(folder, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code entry_error;
    if (it->is_regular_file(entry_error) && !entry_error) {
      const uint64_t size = it->file_size(entry_error);
      bytes += entry_error ? 0 : size;
    }
  }
  return bytes;
}

// Without what the folder holds, a default drawn from the free space would shrink with every
// restart.
DiskSpace DiskOf(const std::string& folder) {
  fs::path place = folder;
  std::error_code error;
  while (!fs::exists(place, error) && place.has_parent_path() && place != place.parent_path()) {
    place = place.parent_path();
  }
  const fs::space_info space = fs::space(place, error);
  if (error) {
    return {};
  }
  return {.capacity_bytes = space.capacity, .free_bytes = space.available + BytesIn(folder)};
}

}  // namespace

Surroundings ReadSurroundings() {
  return {.memory_bytes = AvailableMemoryBytes(),
          .cpus = static_cast<uint32_t>(AvailableCpus()),
          .uid = static_cast<uint32_t>(::geteuid()),
          .home = FolderFrom("HOME"),
          .runtime_folder = FolderFrom("XDG_RUNTIME_DIR"),
          .state_folder = AbsolutePathFrom("XDG_STATE_HOME"),
          .disk = DiskOf};
}

}  // namespace ebbtide::service
