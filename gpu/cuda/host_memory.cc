// SPDX-License-Identifier: Apache-2.0

#include "gpu/cuda/host_memory.h"

#include <cuda_runtime_api.h>
#include <sys/resource.h>

#include <string>

#include "absl/strings/str_cat.h"

#include "base/bytes.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "gpu/cuda/cuda_status.h"
#include "gpu/host_memory_full.h"

namespace ebbtide::gpu {
namespace {

std::string LockedMemoryLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return "no limit on locked memory is set: the machine is short of memory";
  }
  return absl::StrCat("the limit on locked memory is ", FormatBytes(limit.rlim_cur),
                      " (ulimit -l); raise it");
}

absl::Status Refused(const std::string& what, cudaError_t error) {
  const absl::Status status = CudaStatus(what, error);
  switch (error) {
    case cudaErrorMemoryAllocation:
    case cudaErrorOperatingSystem:
      return HostMemoryFull(
          absl::StrCat(what, " can't be locked: ", LockedMemoryLimit(), ", or lower host.budget"));
    case cudaErrorHostMemoryAlreadyRegistered:
      return absl::InvalidArgumentError(absl::StrCat(what, " is registered already"));
    case cudaErrorNotSupported:
      return absl::UnimplementedError(
          absl::StrCat(what, ": this system does not register host memory"));
    default:
      return status;
  }
}

void Unregister(std::span<std::byte> memory) {
  const absl::Status status =
      CudaStatus("host memory is not unregistered", cudaHostUnregister(memory.data()));
  if (status.ok()) return;
  Log(LogLevel::kError, "host memory stays locked for the device until the daemon ends",
      {{"bytes", memory.size()}, {"why", std::string(status.message())}});
}

}  // namespace

absl::StatusOr<DeviceBuffer> RegisterHostMemory(std::span<std::byte> memory) {
  if (memory.empty()) return absl::InvalidArgumentError("host memory of 0 bytes to register");
  const std::string what = absl::StrCat("host memory of ", FormatBytes(memory.size()));
  const cudaError_t error = cudaHostRegister(memory.data(), memory.size(),
                                             cudaHostRegisterMapped | cudaHostRegisterPortable);
  if (error != cudaSuccess) return Refused(what, error);
  return DeviceBuffer(memory, [](std::span<std::byte> kept) { Unregister(kept); });
}

}  // namespace ebbtide::gpu
