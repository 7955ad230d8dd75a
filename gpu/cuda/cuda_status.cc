// SPDX-License-Identifier: Apache-2.0

#include "gpu/cuda/cuda_status.h"

#include "absl/strings/str_cat.h"

namespace ebbtide::gpu {

absl::Status CudaStatus(std::string_view what, cudaError_t error) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat(std::string(what), ": ", cudaGetErrorName(error));
  if (error == cudaErrorMemoryAllocation) {
    return absl::ResourceExhaustedError(
        absl::StrCat(message, "; lower the device budget or free device memory"));
  }
  return absl::UnavailableError(
      absl::StrCat(message, "; the device is lost to this process, restart the daemon"));
}

}  // namespace ebbtide::gpu
