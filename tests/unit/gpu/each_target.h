// SPDX-License-Identifier: Apache-2.0
//
// Runs a test once for each SIMD target of this build, forced, and where asked on the reference
// loops too; a target that this CPU lacks says "not run".
//
//   using AttendOnTarget = OnTarget;
//   TEST_P(AttendOnTarget, AgreesWithReference) { … }
//   INSTANTIATE_TEST_SUITE_P(EveryTarget, AttendOnTarget, EveryTarget(), TargetName);

#pragma once

#include <string>

#include "gtest/gtest.h"

#include "gpu/cpu/simd_targets.h"

namespace ebbtide::gpu {

class OnTarget : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (GetParam() != "reference" && !ForceSimdTarget(GetParam()).ok()) {
      GTEST_SKIP() << "not run: this build or CPU has no " << GetParam();
    }
  }
  void TearDown() override { ASSERT_TRUE(ForceSimdTarget("auto").ok()); }
};

// With "reference" among the targets.
class OnReferenceAndTarget : public OnTarget {
 protected:
  template <class Function>
  Function* Choose(Function* reference, Function* cpu) const {
    return GetParam() == "reference" ? reference : cpu;
  }
};

inline auto EveryTarget() {
  return testing::Values("avx512", "avx2", "sse4");
}
inline auto ReferenceAndEveryTarget() {
  return testing::Values("reference", "avx512", "avx2", "sse4");
}

inline std::string TargetName(const testing::TestParamInfo<std::string>& target) {
  return target.param;
}

}  // namespace ebbtide::gpu
