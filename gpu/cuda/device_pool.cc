// SPDX-License-Identifier: Apache-2.0

#include "gpu/cuda/device_pool.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "base/bytes.h"
#include "base/status_macros.h"
#include "gpu/cuda/cuda_status.h"

namespace ebbtide::gpu {
namespace {

constexpr size_t kAlignment = size_t{2} << 20;

std::string Asked(size_t bytes) {
  return absl::StrCat("device memory of ", FormatBytes(bytes));
}

absl::Status NoRoom(size_t bytes) {
  size_t free = 0;
  size_t total = 0;
  const bool is_known = cudaMemGetInfo(&free, &total) == cudaSuccess;
  return absl::ResourceExhaustedError(absl::StrCat(
      Asked(bytes), ": ",
      is_known ? absl::StrCat(FormatBytes(free), " of ", FormatBytes(total), " are free")
               : "the device is full",
      "; lower the device budget, or what other processes on the device take"));
}

// One range of addresses and the chunks behind its first bytes. Undoes itself, last step first.
class MappedRange {
 public:
  MappedRange(const VirtualMemory& memory, size_t bytes) : memory_(memory), asked_bytes_(bytes) {
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
    if (memory.exports_files) {
      properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    }
  }
  MappedRange(const MappedRange&) = delete;
  MappedRange& operator=(const MappedRange&) = delete;

  // What cannot be undone is the device's, which is lost then: nobody is told.
  ~MappedRange() {
    for (; !chunks_.empty(); chunks_.pop_back()) {
      mapped_bytes_ -= chunks_.back().bytes;
      (void)memory_.unmap(address_ + mapped_bytes_, chunks_.back().bytes);
      (void)memory_.release(chunks_.back().handle);
    }
    if (address_ != 0) (void)memory_.unreserve(address_, reserved_bytes_);
  }

  absl::Status Fill(size_t chunk_bytes) {
    size_t granularity = 0;
    EBBTIDE_RETURN_IF_ERROR(
        Status(memory_.granularity(&granularity, &properties_, CU_MEM_ALLOC_GRANULARITY_MINIMUM)));
    reserved_bytes_ = RoundUp(asked_bytes_, granularity);
    chunk_bytes = RoundUp(chunk_bytes, granularity);
    EBBTIDE_RETURN_IF_ERROR(Status(
        memory_.reserve(&address_, reserved_bytes_, std::max(granularity, kAlignment), 0, 0)));
    while (mapped_bytes_ < reserved_bytes_) {
      EBBTIDE_RETURN_IF_ERROR(AddChunk(std::min(chunk_bytes, reserved_bytes_ - mapped_bytes_)));
    }
    const CUmemAccessDesc access = {.location = properties_.location,
                                    .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return Status(memory_.set_access(address_, reserved_bytes_, &access, 1));
  }

  std::byte* address() const {
    return reinterpret_cast<std::byte*>(static_cast<uintptr_t>(address_));
  }

 private:
  struct Chunk {
    CUmemGenericAllocationHandle handle = 0;
    size_t bytes = 0;
  };

  absl::Status AddChunk(size_t bytes) {
    Chunk chunk{.bytes = bytes};
    EBBTIDE_RETURN_IF_ERROR(Status(memory_.create(&chunk.handle, bytes, &properties_, 0)));
    const CUresult mapped = memory_.map(address_ + mapped_bytes_, bytes, 0, chunk.handle, 0);
    if (mapped != CUDA_SUCCESS) {
      (void)memory_.release(chunk.handle);
      return Status(mapped);
    }
    chunks_.push_back(chunk);
    mapped_bytes_ += bytes;
    return absl::OkStatus();
  }

  absl::Status Status(CUresult result) const {
    if (result == CUDA_SUCCESS) return absl::OkStatus();
    if (result == CUDA_ERROR_OUT_OF_MEMORY) return NoRoom(asked_bytes_);
    const char* name = nullptr;
    if (memory_.error_name(result, &name) != CUDA_SUCCESS) name = "an unknown error";
    return absl::UnavailableError(absl::StrCat(Asked(asked_bytes_), ": ", name));
  }

  const VirtualMemory memory_;
  const size_t asked_bytes_;
  CUmemAllocationProp properties_{};
  CUdeviceptr address_ = 0;
  size_t reserved_bytes_ = 0;
  size_t mapped_bytes_ = 0;
  std::vector<Chunk> chunks_;
};

// With room to spare, so that an aligned piece can be used.
absl::StatusOr<DeviceBuffer> AllocatePlain(size_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, bytes + kAlignment);
  const absl::Status status = CudaStatus(Asked(bytes), error);
  if (absl::IsResourceExhausted(status)) return NoRoom(bytes);
  EBBTIDE_RETURN_IF_ERROR(status);
  const auto address = reinterpret_cast<uintptr_t>(memory);
  auto* const aligned = static_cast<std::byte*>(memory) + (RoundUp(address, kAlignment) - address);
  return DeviceBuffer({aligned, bytes},
                      [memory](std::span<std::byte> /*bytes*/) { (void)cudaFree(memory); });
}

absl::StatusOr<DeviceBuffer> AllocateMapped(const VirtualMemory& memory,
                                            const DevicePoolOptions& options) {
  auto range = std::make_shared<MappedRange>(memory, options.bytes);
  EBBTIDE_RETURN_IF_ERROR(range->Fill(options.chunk_bytes));
  std::byte* const address = range->address();
  // Unlike freeing, unmapping does not wait for what still runs.
  return DeviceBuffer({address, options.bytes}, [range](std::span<std::byte> /*bytes*/) mutable {
    (void)cudaDeviceSynchronize();
    range.reset();
  });
}

absl::Status Zero(std::span<std::byte> bytes) {
  cudaStream_t stream = nullptr;
  EBBTIDE_RETURN_IF_ERROR(
      CudaStatus("stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)));
  cudaError_t error = cudaMemsetAsync(bytes.data(), 0, bytes.size(), stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  (void)cudaStreamDestroy(stream);
  return CudaStatus("zeroing device memory", error);
}

}  // namespace

absl::StatusOr<DeviceBuffer> AllocateDevicePool(const CudaDevice& device,
                                                const DevicePoolOptions& options) {
  if (options.bytes > device.memory_bytes) return NoRoom(options.bytes);
  EBBTIDE_ASSIGN_OR_RETURN(DeviceBuffer buffer,
                           device.virtual_memory.has_value()
                               ? AllocateMapped(*device.virtual_memory, options)
                               : AllocatePlain(options.bytes));
  EBBTIDE_RETURN_IF_ERROR(Zero(buffer.bytes()));
  return buffer;
}

}  // namespace ebbtide::gpu
