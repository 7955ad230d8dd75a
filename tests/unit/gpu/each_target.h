// SPDX-License-Identifier: Apache-2.0
//
// Runs a test once for each SIMD target of this build, forced, and where asked on CUDA and on the
// reference loops too; a target that this CPU lacks, or CUDA without its headers, says "not run".
//
//   class AttendOnTarget : public OnTarget { … Choose(&AttendCpu, &AttendOnCuda)(args) … };
//   TEST_P(AttendOnTarget, AgreesWithReference) { … }
//   INSTANTIATE_TEST_SUITE_P(EveryTarget, AttendOnTarget, EveryTargetAndCuda(), TargetName);

#pragma once

#include <string>

#include "gtest/gtest.h"

#include "gpu/cpu/simd_targets.h"
#include "tests/unit/gpu/on_cuda.h"

namespace ebbtide::gpu {

class OnTarget : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() == "cuda") {
      if (!WhyNoCuda().empty()) GTEST_SKIP() << "not run: " << WhyNoCuda();
      // The emulator's fibers do not survive a fork under the thread sanitizer.
      GTEST_FLAG_SET(death_test_style, "threadsafe");
      return;
    }
    if (GetParam() != "reference" && !ForceSimdTarget(GetParam()).ok()) {
      GTEST_SKIP() << "not run: this build or CPU has no " << GetParam();
    }
  }
  void TearDown() override {
    GTEST_FLAG_SET(death_test_style, "fast");
    ASSERT_TRUE(ForceSimdTarget("auto").ok());
  }

  template <class Function>
  Function* Choose(Function* cpu, Function* cuda) const {
    return GetParam() == "cuda" ? cuda : cpu;
  }
};

// With "reference" among the targets.
class OnReferenceAndTarget : public OnTarget {
 protected:
  template <class Function>
  Function* Choose(Function* reference, Function* cpu) const {
    return GetParam() == "reference" ? reference : cpu;
  }
  template <class Function>
  Function* Choose(Function* reference, Function* cpu, Function* cuda) const {
    return GetParam() == "cuda" ? cuda : Choose(reference, cpu);
  }
};

inline auto EveryTarget() {
  return testing::Values("avx512", "avx2", "sse4");
}
inline auto EveryTargetAndCuda() {
  return testing::Values("avx512", "avx2", "sse4", "cuda");
}
inline auto ReferenceAndEveryTarget() {
  return testing::Values("reference", "avx512", "avx2", "sse4");
}
inline auto ReferenceTargetsAndCuda() {
  return testing::Values("reference", "avx512", "avx2", "sse4", "cuda");
}

inline std::string TargetName(const testing::TestParamInfo<std::string>& target) {
  return target.param;
}

}  // namespace ebbtide::gpu
