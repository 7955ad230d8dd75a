// SPDX-License-Identifier: Apache-2.0
//
// What a configuration's defaults depend on: the machine and the user. A value, so that defaults
// are tested without being that machine or that user.

#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace ebbtide::service {

struct DiskSpace {
  uint64_t capacity_bytes = 0;  // 0: not known
  uint64_t free_bytes = 0;      // For this folder: what it takes already counts as free.
};

struct Surroundings {
  uint64_t memory_bytes = 0;  // This process may use.
  uint32_t cpus = 1;
  uint32_t uid = 0;
  std::string home;            // Folders that exist; "" where there is none.
  std::string runtime_folder;  // $XDG_RUNTIME_DIR
  std::string state_folder;    // $XDG_STATE_HOME; may have to be made.
  std::function<DiskSpace(const std::string& folder)> disk;
};

// Those of this process.
Surroundings ReadSurroundings();

}  // namespace ebbtide::service
