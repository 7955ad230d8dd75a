// SPDX-License-Identifier: Apache-2.0

#include "gpu/cuda/cuda_status.h"

#include "absl/strings/str_cat.h"

namespace ebbtide::gpu {

absl::Status CudaStatus(std::string_view what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // Known now, not an answer to the next launch.
  const std::string message = absl::StrCat(std::string(what), ": ", cudaGetErrorName(error));
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::ResourceExhaustedError(
          absl::StrCat(message, "; lower the device budget or free device memory"));
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidKernelImage:
    case cudaErrorInvalidPtx:
    case cudaErrorInvalidSource:
    case cudaErrorJitCompilationDisabled:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return absl::InternalError(absl::StrCat(
          message, "; this build has no kernels for the device: build it with the device's own ",
          "CMAKE_CUDA_ARCHITECTURES, or choose another with CUDA_VISIBLE_DEVICES"));
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidSymbol:
    case cudaErrorInvalidValue:
    case cudaErrorLaunchOutOfResources:
    case cudaErrorNotSupported:
      return absl::InternalError(
          absl::StrCat(message, "; this build does not fit the device: please report it"));
    default:
      return absl::UnavailableError(
          absl::StrCat(message, "; the device is lost to this process, restart the daemon"));
  }
}

}  // namespace ebbtide::gpu
