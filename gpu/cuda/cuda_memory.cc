// SPDX-License-Identifier: Apache-2.0

#include "gpu/cuda/cuda_memory.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"

#include "base/bytes.h"
#include "gpu/cuda/cuda_status.h"
#include "gpu/host_memory_full.h"

namespace ebbtide::gpu {
namespace {

template <class Memory>
absl::StatusOr<Memory> Owned(const char* kind, size_t bytes, void* memory, cudaError_t error) {
  if (error == cudaSuccess) return Memory(static_cast<std::byte*>(memory));
  return CudaStatus(absl::StrCat(kind, " memory of ", FormatBytes(bytes)), error);
}

}  // namespace

// What cannot be freed is the device's, which is lost then: nobody is told.
void FreeDeviceMemory::operator()(std::byte* memory) const {
  (void)cudaFree(memory);
}
void FreePinnedMemory::operator()(std::byte* memory) const {
  (void)cudaFreeHost(memory);
}

absl::StatusOr<DeviceMemory> AllocateDevice(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, bytes);
  return Owned<DeviceMemory>("device", bytes, memory, error);
}

absl::StatusOr<PinnedMemory> AllocatePinned(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocDefault);
  if (error == cudaErrorMemoryAllocation) {
    (void)CudaStatus("pinned memory", error);  // Whose advice is for the device's.
    return HostMemoryFull(
        absl::StrCat("pinned memory of ", FormatBytes(bytes),
                     " can't be had: raise the container's memory limit, or lower host.budget"));
  }
  return Owned<PinnedMemory>("pinned", bytes, memory, error);
}

}  // namespace ebbtide::gpu
