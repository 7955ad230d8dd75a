// SPDX-License-Identifier: Apache-2.0
//
// What this process may use of the machine.

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <thread>

#include "base/cgroup.h"
#include "base/executor.h"

namespace ebbtide {
namespace {

// Machines of more CPUs than cpu_set_t holds (1024) need a longer set: double it until it fits.
int AffinityCpus() {
  for (int cpus = 1024; cpus <= 1024 * 1024; cpus *= 2) {
    const size_t bytes = CPU_ALLOC_SIZE(cpus);
    const std::unique_ptr<cpu_set_t, void (*)(cpu_set_t*)> set(
        CPU_ALLOC(cpus), [](cpu_set_t* allocated) { CPU_FREE(allocated); });
    if (sched_getaffinity(0, bytes, set.get()) == 0) {
      return CPU_COUNT_S(bytes, set.get());
    }
    if (errno != EINVAL) {
      break;
    }
  }
  return static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace

int AvailableCpus() {
  int cpus = AffinityCpus();
  if (const auto quota = ReadCgroupLimits("/").cpus; quota.has_value() && *quota < cpus) {
    cpus = static_cast<int>(*quota);
  }
  return std::max(cpus, 1);
}

size_t AvailableMemoryBytes() {
  const auto pages = static_cast<uint64_t>(std::max(sysconf(_SC_PHYS_PAGES), 0L));
  const auto page_bytes = static_cast<uint64_t>(std::max(sysconf(_SC_PAGESIZE), 0L));
  const uint64_t physical = pages * page_bytes;
  return std::min(physical, ReadCgroupLimits("/").memory_bytes.value_or(physical));
}

}  // namespace ebbtide
