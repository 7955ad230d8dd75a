// SPDX-License-Identifier: Apache-2.0
//
// The CUDA kernels as the contracts' tests call them: one lane, done on return. They run on the
// emulator (tests/cuemu), where device memory is this process's; without CUDA's headers they are
// not built, and kHasCuda is false.

#pragma once

#include "gtest/gtest.h"

#include "gpu/kernels/attend.h"

#if defined(EBBTIDE_CUDA_EMULATED)
#include "gpu/cuda/cuda_stream.h"
#include "gpu/cuda/kernels.h"
#endif

namespace ebbtide::gpu {

#if defined(EBBTIDE_CUDA_EMULATED)

inline constexpr bool kHasCuda = true;

// Runs `operation` over `lanes` on a stream of its own.
template <class Args>
void RunOnCuda(absl::Status (*operation)(std::span<const Args>, CudaStream&),
               std::span<const Args> lanes) {
  const auto stream = CudaStream::Make();
  ASSERT_TRUE(stream.ok()) << stream.status();
  const absl::Status run = operation(lanes, **stream);
  ASSERT_TRUE(run.ok()) << run;
  const absl::Status done = (*stream)->Wait();
  ASSERT_TRUE(done.ok()) << done;
}

inline void AttendOnCuda(const AttendArgs& args) {
  RunOnCuda<AttendArgs>(&AttendCuda, {&args, 1});
}

#else

inline constexpr bool kHasCuda = false;

inline void AttendOnCuda(const AttendArgs& /*args*/) {}

#endif

}  // namespace ebbtide::gpu
