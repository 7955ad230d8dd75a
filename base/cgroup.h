// SPDX-License-Identifier: Apache-2.0
//
// What the control groups of this process allow it, in version 1 and 2 of their file system. Read
// once at start, for the defaults of threads and budgets (executor.h).

#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

namespace ebbtide {

struct CgroupLimits {
  std::optional<double> cpus;            // Quota over period; none: not limited.
  std::optional<uint64_t> memory_bytes;  // None: not limited.
};

// The least limit of the process's groups and all their visible ancestors. What cannot be read does
// not limit. `root` is "/", or a tree made by a test: root/proc/self/{cgroup,mountinfo} and the
// mounts.
CgroupLimits ReadCgroupLimits(const std::filesystem::path& root);

}  // namespace ebbtide
