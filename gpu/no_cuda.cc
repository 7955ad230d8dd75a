// SPDX-License-Identifier: Apache-2.0
//
// What stands in for gpu/cuda in a build without nvcc.

#include "gpu/make_cuda_backend.h"

namespace ebbtide::gpu {

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend() {
  return absl::UnimplementedError(
      "this build has no CUDA: nvcc 12 or later was not found when it was configured");
}

}  // namespace ebbtide::gpu
