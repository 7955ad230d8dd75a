// SPDX-License-Identifier: Apache-2.0

#include "gpu/cuda/cuda_device.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"

#include "base/status_macros.h"
#include "gpu/cuda/cuda_status.h"

namespace ebbtide::gpu {
namespace {

constexpr int kDevice = 0;

std::string Version(int number) {  // 13000: "13.0"
  return absl::StrCat(number / 1000, ".", number % 1000 / 10);
}

absl::Status NoDriver() {
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    return absl::FailedPreconditionError(
        "no CUDA driver: libcuda.so.1 was not found; install the NVIDIA driver, or start the "
        "container with its runtime");
  }
  return absl::FailedPreconditionError(absl::StrCat("the CUDA driver is for CUDA ", Version(driver),
                                                    ", this build needs ", Version(CUDART_VERSION),
                                                    "; update the driver"));
}

absl::Status NoDevice() {
  return absl::FailedPreconditionError(
      "no CUDA device is visible to this process; look at CUDA_VISIBLE_DEVICES and nvidia-smi");
}

// Null where the driver lacks it.
template <class Function>
bool Find(const char* name, Function** function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kSince = 11020;  // All of them, in their first form.
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &found, kSince, cudaEnableDefault, &result);
#else
  (void)kSince;
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  *function = reinterpret_cast<Function*>(found);
  return error == cudaSuccess && result == cudaDriverEntryPointSuccess && found != nullptr;
}

std::optional<VirtualMemory> FindVirtualMemory() {
  VirtualMemory memory;
  decltype(&cuDeviceGetAttribute) attribute = nullptr;
  const bool has_all =
      Find("cuMemGetAllocationGranularity", &memory.granularity) &&
      Find("cuMemAddressReserve", &memory.reserve) && Find("cuMemAddressFree", &memory.unreserve) &&
      Find("cuMemCreate", &memory.create) && Find("cuMemRelease", &memory.release) &&
      Find("cuMemMap", &memory.map) && Find("cuMemUnmap", &memory.unmap) &&
      Find("cuMemSetAccess", &memory.set_access) && Find("cuGetErrorName", &memory.error_name) &&
      Find("cuDeviceGetAttribute", &attribute);
  if (!has_all) return std::nullopt;
  const auto is_true = [&](CUdevice_attribute which) {
    int value = 0;
    return attribute(&value, which, kDevice) == CUDA_SUCCESS && value != 0;
  };
  if (!is_true(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)) return std::nullopt;
  memory.exports_files = is_true(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  return memory;
}

}  // namespace

absl::StatusOr<CudaDevice> FindCudaDevice() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error == cudaErrorInsufficientDriver) return NoDriver();
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0)) return NoDevice();
  EBBTIDE_RETURN_IF_ERROR(CudaStatus("CUDA devices", error));

  cudaDeviceProp properties{};
  EBBTIDE_RETURN_IF_ERROR(
      CudaStatus("CUDA device 0", cudaGetDeviceProperties(&properties, kDevice)));
  CudaDevice device{.name = properties.name,
                    .capability = 10 * properties.major + properties.minor,
                    .memory_bytes = properties.totalGlobalMem,
                    .reads_host_addresses = properties.canUseHostPointerForRegisteredMem != 0};
  if (device.capability < kCudaCapabilityMin) {
    return absl::FailedPreconditionError(absl::StrCat(
        device.name, " has compute capability ", properties.major, ".", properties.minor,
        ", this build's kernels need ", kCudaCapabilityMin / 10, ".", kCudaCapabilityMin % 10,
        " or later; choose another device with CUDA_VISIBLE_DEVICES, or build with ",
        "CMAKE_CUDA_ARCHITECTURES of its own (8.0 at least)"));
  }
  EBBTIDE_RETURN_IF_ERROR(CudaStatus(device.name, cudaSetDevice(kDevice)));
  device.virtual_memory = FindVirtualMemory();
  return device;
}

}  // namespace ebbtide::gpu
