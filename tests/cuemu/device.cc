// SPDX-License-Identifier: Apache-2.0

#include "tests/cuemu/device.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <vector>

#include "tests/cuemu/runtime.h"

namespace {

constexpr size_t kGranularity = size_t{2} << 20;
constexpr size_t kPage = 4096;
constexpr size_t kAlignment = 256;  // cudaMalloc's.

size_t RoundUp(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Physical memory of a chunk; where it is mapped, if it is.
struct Chunk {
  size_t bytes = 0;
  bool is_mapped = false;
};

struct State {
  std::mutex mutex;
  cuemu::DeviceTraits traits;
  size_t taken_bytes = 0;
  size_t locked_bytes = 0;  // Of the host: pinned or registered.
  size_t registered_bytes = 0;
  std::map<void*, size_t> registered;
  std::map<CUdeviceptr, size_t> ranges;
  std::map<CUdeviceptr, size_t> accessible;
  int working = 0;
};

State& TheState() {
  static State* const state = new State;
  return *state;
}

void* Address(CUdeviceptr at) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(at));
}
Chunk* Real(CUmemGenericAllocationHandle handle) {
  return reinterpret_cast<Chunk*>(static_cast<uintptr_t>(handle));
}

CUresult Granularity(size_t* bytes, const CUmemAllocationProp* /*properties*/,
                     CUmemAllocationGranularity_flags /*which*/) {
  *bytes = kGranularity;
  return CUDA_SUCCESS;
}

// Aligned by reserving more and giving back what lies around.
CUresult Reserve(CUdeviceptr* at, size_t bytes, size_t alignment, CUdeviceptr /*wish*/,
                 unsigned long long /*flags*/) {
  if (bytes % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  void* const memory = mmap(nullptr, bytes + alignment, PROT_NONE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto start = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t aligned = (start + alignment - 1) / alignment * alignment;
  if (aligned > start) munmap(memory, aligned - start);
  if (start + alignment > aligned) {
    munmap(reinterpret_cast<void*>(aligned + bytes), start + alignment - aligned);
  }
  *at = aligned;
  const std::lock_guard lock(TheState().mutex);
  TheState().ranges[*at] = bytes;
  return CUDA_SUCCESS;
}

CUresult Unreserve(CUdeviceptr at, size_t bytes) {
  const std::lock_guard lock(TheState().mutex);
  const auto range = TheState().ranges.find(at);
  if (range == TheState().ranges.end() || range->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  TheState().ranges.erase(range);
  TheState().accessible.erase(at);
  munmap(Address(at), bytes);
  return CUDA_SUCCESS;
}

CUresult Create(CUmemGenericAllocationHandle* handle, size_t bytes,
                const CUmemAllocationProp* properties, unsigned long long /*flags*/) {
  if (bytes % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  if (properties->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE &&
      !TheState().traits.exports_files) {
    return CUDA_ERROR_NOT_SUPPORTED;
  }
  if (!cuemu::TakeDeviceBytes(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = reinterpret_cast<uintptr_t>(new Chunk{.bytes = bytes});
  return CUDA_SUCCESS;
}

CUresult Release(CUmemGenericAllocationHandle handle) {
  if (Real(handle)->is_mapped) return CUDA_ERROR_INVALID_VALUE;  // As a leak would be here.
  cuemu::GiveDeviceBytes(Real(handle)->bytes);
  delete Real(handle);
  return CUDA_SUCCESS;
}

std::map<CUdeviceptr, Chunk*>& Mapped() {
  static auto* const mapped = new std::map<CUdeviceptr, Chunk*>;
  return *mapped;
}

CUresult Map(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long /*flags*/) {
  const std::lock_guard lock(TheState().mutex);
  if (offset != 0 || bytes != Real(handle)->bytes || Mapped().contains(at)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Real(handle)->is_mapped = true;
  Mapped()[at] = Real(handle);
  return CUDA_SUCCESS;
}

CUresult Unmap(CUdeviceptr at, size_t bytes) {
  const std::lock_guard lock(TheState().mutex);
  const auto mapped = Mapped().find(at);
  if (mapped == Mapped().end() || mapped->second->bytes != bytes) return CUDA_ERROR_INVALID_VALUE;
  mapped->second->is_mapped = false;
  Mapped().erase(mapped);
  mmap(Address(at), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
       0);
  return CUDA_SUCCESS;
}

// Memory that nobody wrote yet holds 0xFF, as all of this device.
CUresult SetAccess(CUdeviceptr at, size_t bytes, const CUmemAccessDesc* /*access*/,
                   size_t /*count*/) {
  const std::lock_guard lock(TheState().mutex);
  for (CUdeviceptr chunk = at; chunk < at + bytes;) {
    const auto mapped = Mapped().find(chunk);
    if (mapped == Mapped().end()) return CUDA_ERROR_INVALID_VALUE;
    chunk += mapped->second->bytes;
  }
  mprotect(Address(at), bytes, PROT_READ | PROT_WRITE);
  std::memset(Address(at), 0xFF, bytes);
  TheState().accessible[at] = bytes;
  if (TheState().traits.hides_memory) mprotect(Address(at), bytes, PROT_NONE);
  return CUDA_SUCCESS;
}

CUresult Attribute(int* value, CUdevice_attribute which, CUdevice /*device*/) {
  const cuemu::DeviceTraits& traits = TheState().traits;
  *value = which == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
               ? traits.has_virtual_memory
               : traits.exports_files;
  return CUDA_SUCCESS;
}

CUresult ErrorName(CUresult error, const char** name) {
  *name = error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_UNKNOWN";
  return CUDA_SUCCESS;
}

void* DriverFunction(std::string_view name) {
  if (name == "cuMemGetAllocationGranularity") return reinterpret_cast<void*>(&Granularity);
  if (name == "cuMemAddressReserve") return reinterpret_cast<void*>(&Reserve);
  if (name == "cuMemAddressFree") return reinterpret_cast<void*>(&Unreserve);
  if (name == "cuMemCreate") return reinterpret_cast<void*>(&Create);
  if (name == "cuMemRelease") return reinterpret_cast<void*>(&Release);
  if (name == "cuMemMap") return reinterpret_cast<void*>(&Map);
  if (name == "cuMemUnmap") return reinterpret_cast<void*>(&Unmap);
  if (name == "cuMemSetAccess") return reinterpret_cast<void*>(&SetAccess);
  if (name == "cuGetErrorName") return reinterpret_cast<void*>(&ErrorName);
  if (name == "cuDeviceGetAttribute") return reinterpret_cast<void*>(&Attribute);
  return nullptr;
}

}  // namespace

namespace cuemu {

void SetDevice(const DeviceTraits& traits) {
  const std::lock_guard lock(TheState().mutex);
  TheState().traits = traits;
}

size_t DeviceBytesTaken() {
  const std::lock_guard lock(TheState().mutex);
  return TheState().taken_bytes;
}
size_t HostBytesRegistered() {
  const std::lock_guard lock(TheState().mutex);
  return TheState().registered_bytes;
}
bool IsRegistered(const void* memory, size_t bytes) {
  const std::lock_guard lock(TheState().mutex);
  const auto& registered = TheState().registered;
  auto piece = registered.upper_bound(const_cast<void*>(memory));
  if (piece == registered.begin()) return false;
  --piece;
  const auto offset = static_cast<size_t>(static_cast<const std::byte*>(memory) -
                                          static_cast<const std::byte*>(piece->first));
  return offset + bytes <= piece->second;
}
int RangesReserved() {
  const std::lock_guard lock(TheState().mutex);
  return static_cast<int>(TheState().ranges.size());
}

bool TakeDeviceBytes(size_t bytes) {
  const std::lock_guard lock(TheState().mutex);
  if (bytes > TheState().traits.memory_bytes - TheState().taken_bytes) return false;
  TheState().taken_bytes += bytes;
  return true;
}
void GiveDeviceBytes(size_t bytes) {
  const std::lock_guard lock(TheState().mutex);
  TheState().taken_bytes -= bytes;
}

bool TakeLockedBytes(size_t bytes) {
  const std::lock_guard lock(TheState().mutex);
  if (TheState().locked_bytes + bytes > TheState().traits.lockable_bytes) return false;
  TheState().locked_bytes += bytes;
  return true;
}
void GiveLockedBytes(size_t bytes) {
  const std::lock_guard lock(TheState().mutex);
  TheState().locked_bytes -= bytes;
}

bool HidesMemory() {
  const std::lock_guard lock(TheState().mutex);
  return TheState().traits.hides_memory;
}

void* MapHidden(size_t bytes) {
  const size_t pages = RoundUp(bytes, kPage);
  void* const mapped = mmap(nullptr, pages + kPage, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  std::memset(mapped, 0xFF, pages);
  mprotect(static_cast<std::byte*>(mapped) + pages, kPage, PROT_NONE);
  const std::lock_guard lock(TheState().mutex);
  TheState().accessible[reinterpret_cast<uintptr_t>(mapped)] = pages;
  if (TheState().working == 0) mprotect(mapped, pages, PROT_NONE);
  return static_cast<std::byte*>(mapped) + (pages - RoundUp(bytes, kAlignment));
}
void UnmapHidden(void* memory, size_t bytes) {
  const size_t pages = RoundUp(bytes, kPage);
  std::byte* const mapped = static_cast<std::byte*>(memory) - (pages - RoundUp(bytes, kAlignment));
  const std::lock_guard lock(TheState().mutex);
  TheState().accessible.erase(reinterpret_cast<uintptr_t>(mapped));
  munmap(mapped, pages + kPage);
}

Working::Working() {
  const std::lock_guard lock(TheState().mutex);
  if (TheState().working++ > 0) return;  // Work that waits for another stream's.
  for (const auto& [at, bytes] : TheState().accessible) {
    mprotect(Address(at), bytes, PROT_READ | PROT_WRITE);
  }
}
Working::~Working() {
  const std::lock_guard lock(TheState().mutex);
  if (--TheState().working > 0 || !TheState().traits.hides_memory) return;
  for (const auto& [at, bytes] : TheState().accessible) mprotect(Address(at), bytes, PROT_NONE);
}

}  // namespace cuemu

// NOLINTBEGIN(readability-identifier-naming): CUDA's own names.
extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  const cuemu::DeviceTraits& traits = TheState().traits;
  if (traits.driver_version < CUDART_VERSION) return cudaErrorInsufficientDriver;
  *count = traits.devices;
  if (traits.devices == 0) return cudaErrorNoDevice;
  return cuemu::Answer(cudaSuccess);
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = TheState().traits.driver_version;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  const cuemu::DeviceTraits& traits = TheState().traits;
  *properties = cudaDeviceProp{};
  traits.name.copy(properties->name, sizeof(properties->name) - 1);
  properties->totalGlobalMem = traits.memory_bytes;
  properties->major = traits.major;
  properties->minor = traits.minor;
  properties->canUseHostPointerForRegisteredMem = traits.reads_host_addresses ? 1 : 0;
  return cuemu::Answer(cudaSuccess);
}
cudaError_t cudaSetDevice(int /*device*/) {
  return cuemu::Answer(cudaSuccess);
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = TheState().traits.memory_bytes;
  *free = *total - cuemu::DeviceBytesTaken();
  return cuemu::Answer(cudaSuccess);
}

cudaError_t cudaHostRegister(void* memory, size_t bytes, unsigned /*flags*/) {
  State& state = TheState();
  {
    const std::lock_guard lock(state.mutex);
    // Any part of it.
    auto* const first = static_cast<std::byte*>(memory);
    const auto behind = state.registered.lower_bound(first + bytes);
    if (behind != state.registered.begin()) {
      const auto& [other, other_bytes] = *std::prev(behind);
      if (static_cast<std::byte*>(other) + other_bytes > first)
        return cuemu::Answer(cudaErrorHostMemoryAlreadyRegistered);
    }
  }
  if (!state.traits.registers_memory || !cuemu::TakeLockedBytes(bytes))
    return cuemu::Answer(cudaErrorMemoryAllocation);
  const std::lock_guard lock(state.mutex);
  state.registered[memory] = bytes;
  state.registered_bytes += bytes;
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* memory) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  const auto found = state.registered.find(memory);
  if (found == state.registered.end()) return cuemu::Answer(cudaErrorHostMemoryNotRegistered);
  state.registered_bytes -= found->second;
  state.locked_bytes -= found->second;
  state.registered.erase(found);
  return cudaSuccess;
}

#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function,
                                             unsigned /*version*/, unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* result) {
#else
cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long /*flags*/,
                                    cudaDriverEntryPointQueryResult* result) {
#endif
  *function = DriverFunction(name);
  *result = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
// NOLINTEND(readability-identifier-naming): back to the rules.
