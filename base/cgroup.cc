// SPDX-License-Identifier: Apache-2.0

#include "base/cgroup.h"

#include <algorithm>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"

namespace ebbtide {
namespace {

namespace fs = std::filesystem;

// One mounted control-group file system: which part of the hierarchy is seen where.
struct CgroupMount {
  std::string root;   // The group that is seen at `point`.
  std::string point;  // Where it is mounted.
  bool is_v2 = false;
  std::vector<std::string> controllers;  // Version 1 only: "cpu", "cpuacct", …
};

std::vector<std::string> ReadLines(const fs::path& file) {
  std::ifstream in(file);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) {
    lines.push_back(line);
  }
  return lines;
}

// mountinfo: "36 35 98:0 /group /point rw,noatime master:1 - cgroup2 cgroup rw,cpu" (proc(5)).
std::vector<CgroupMount> ReadMounts(const fs::path& root) {
  std::vector<CgroupMount> mounts;
  for (const std::string& line : ReadLines(root / "proc/self/mountinfo")) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) {
      continue;
    }
    const std::vector<std::string> place = absl::StrSplit(line.substr(0, dash), ' ');
    const std::vector<std::string> kind = absl::StrSplit(line.substr(dash + 3), ' ');
    if (place.size() < 5 || kind.size() < 3) {
      continue;
    }
    if (kind[0] == "cgroup2") {
      mounts.push_back({.root = place[3], .point = place[4], .is_v2 = true, .controllers = {}});
    } else if (kind[0] == "cgroup") {
      mounts.push_back({.root = place[3],
                        .point = place[4],
                        .is_v2 = false,
                        .controllers = absl::StrSplit(kind[2], ',')});
    }
  }
  return mounts;
}

// The process's group within one hierarchy. /proc/self/cgroup: "0::/path" for version 2,
// "4:cpu,cpuacct:/path" for version 1.
std::string ReadGroup(const fs::path& root, const CgroupMount& mount, const std::string& name) {
  for (const std::string& line : ReadLines(root / "proc/self/cgroup")) {
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) {
      continue;
    }
    const std::vector<std::string> controllers = absl::StrSplit(parts[1], ',');
    const bool is_ours =
        mount.is_v2 ? parts[0] == "0" && parts[1].empty()
                    : std::find(controllers.begin(), controllers.end(), name) != controllers.end();
    if (is_ours) {
      return parts[2];
    }
  }
  return "/";
}

// The folders of the process's group and its ancestors, as far up as the mount shows them. In a
// container the group's path may be the host's, unknown here; then the mount itself is the group.
std::vector<fs::path> Folders(const fs::path& root, const CgroupMount& mount,
                              const std::string& name) {
  const fs::path point = root / fs::path(mount.point).relative_path();
  const fs::path group = fs::path(ReadGroup(root, mount, name)).lexically_relative(mount.root);
  std::vector<fs::path> folders = {point};
  fs::path folder = point;
  for (const fs::path& step : group) {
    if (step == "..") {
      return {point};
    }
    if (step == "." || step.empty()) {
      continue;
    }
    folder /= step;
    std::error_code error;
    if (!fs::is_directory(folder, error)) {
      break;
    }
    folders.push_back(folder);
  }
  return folders;
}

std::vector<std::string> ReadWords(const fs::path& file) {
  std::ifstream in(file);
  std::vector<std::string> words;
  for (std::string word; in >> word;) {
    words.push_back(word);
  }
  return words;
}

std::optional<double> Ratio(const std::string& quota, const std::string& period) {
  double quota_us = 0;
  double period_us = 0;
  if (!absl::SimpleAtod(quota, &quota_us) || !absl::SimpleAtod(period, &period_us) ||
      quota_us <= 0 || period_us <= 0) {
    return std::nullopt;  // "max" and -1: no quota.
  }
  return quota_us / period_us;
}

std::optional<double> ReadCpus(const fs::path& folder, bool is_v2) {
  if (is_v2) {
    const std::vector<std::string> words = ReadWords(folder / "cpu.max");
    return words.size() == 2 ? Ratio(words[0], words[1]) : std::nullopt;
  }
  const std::vector<std::string> quota = ReadWords(folder / "cpu.cfs_quota_us");
  const std::vector<std::string> period = ReadWords(folder / "cpu.cfs_period_us");
  return quota.size() == 1 && period.size() == 1 ? Ratio(quota[0], period[0]) : std::nullopt;
}

std::optional<uint64_t> ReadMemory(const fs::path& folder, bool is_v2) {
  const std::vector<std::string> words =
      ReadWords(folder / (is_v2 ? "memory.max" : "memory.limit_in_bytes"));
  uint64_t bytes = 0;
  // "max" does not parse. Version 1 writes no limit as the largest signed number of whole pages.
  if (words.size() != 1 || !absl::SimpleAtoi(words[0], &bytes) || bytes >= (uint64_t{1} << 62)) {
    return std::nullopt;
  }
  return bytes;
}

template <typename T>
void Lower(std::optional<T>& least, const std::optional<T>& value) {
  if (value.has_value() && (!least.has_value() || *value < *least)) {
    least = value;
  }
}

bool Controls(const CgroupMount& mount, const std::string& name) {
  return mount.is_v2 || std::find(mount.controllers.begin(), mount.controllers.end(), name) !=
                            mount.controllers.end();
}

}  // namespace

CgroupLimits ReadCgroupLimits(const fs::path& root) {
  CgroupLimits limits;
  for (const CgroupMount& mount : ReadMounts(root)) {
    if (Controls(mount, "cpu")) {
      for (const fs::path& folder : Folders(root, mount, "cpu")) {
        Lower(limits.cpus, ReadCpus(folder, mount.is_v2));
      }
    }
    if (Controls(mount, "memory")) {
      for (const fs::path& folder : Folders(root, mount, "memory")) {
        Lower(limits.memory_bytes, ReadMemory(folder, mount.is_v2));
      }
    }
  }
  return limits;
}

}  // namespace ebbtide
