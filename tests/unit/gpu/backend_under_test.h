// SPDX-License-Identifier: Apache-2.0
//
// Every backend of this build, for tests of what backend.h promises.

#pragma once

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/backend.h"
#include "gpu/cpu/cpu_backend.h"
#include "gpu/loss_noting_backend.h"
#include "tests/unit/gpu/on_cuda.h"
#if defined(EBBTIDE_CUDA_EMULATED) || defined(EBBTIDE_CUDA_DEVICE)
#include "gpu/cuda/cuda_backend.h"
#endif
#if defined(EBBTIDE_CUDA_EMULATED)
#include "tests/cuemu/device.h"
#endif

namespace ebbtide::gpu {

struct BackendUnderTest {
  std::string name;
  std::unique_ptr<Backend> (*make)();

  friend std::ostream& operator<<(std::ostream& os, const BackendUnderTest& backend) {
    return os << backend.name;
  }
};

template <int kThreads>
std::unique_ptr<Backend> MakeCpuBackend() {
  return std::make_unique<CpuBackend>(kThreads);
}

// As the service has it.
inline std::unique_ptr<Backend> MakeNotedBackend() {
  static CpuBackend cpu(3);
  return std::make_unique<LossNotingBackend>(cpu);
}

#if defined(EBBTIDE_CUDA_EMULATED) || defined(EBBTIDE_CUDA_DEVICE)
template <size_t kCarriedBytesMax>
std::unique_ptr<Backend> MakeCudaBackend() {
#if defined(EBBTIDE_CUDA_EMULATED)
  cuemu::SetDevice({.hides_memory = true});
#endif
  auto backend = CudaBackend::Make({.carried_bytes_max = kCarriedBytesMax});
  EXPECT_TRUE(backend.ok()) << backend.status();
  return *std::move(backend);
}
#endif

// The last one waits in the middle of a batch for what it carried.
inline std::vector<BackendUnderTest> EveryBackend() {
  std::vector<BackendUnderTest> backends = {{"cpu_on_one_thread", &MakeCpuBackend<1>},
                                            {"cpu_on_three_threads", &MakeCpuBackend<3>},
                                            {"cpu_watched_for_loss", &MakeNotedBackend}};
#if defined(EBBTIDE_CUDA_EMULATED) || defined(EBBTIDE_CUDA_DEVICE)
  if (!WhyNoCuda().empty()) return backends;
  backends.push_back({"cuda", &MakeCudaBackend<(size_t{64} << 20)>});
  backends.push_back({"cuda_that_carries_little", &MakeCudaBackend<4096>});
#endif
  return backends;
}

}  // namespace ebbtide::gpu
