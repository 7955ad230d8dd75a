// SPDX-License-Identifier: Apache-2.0
//
// Names of SIMD targets, and forcing one.

#include "gpu/cpu/simd_targets.h"

#include <algorithm>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/status_matchers.h"

namespace ebbtide::gpu {
namespace {

using test::StatusIs;
using testing::AllOf;
using testing::HasSubstr;

class SimdTargetsTest : public testing::Test {
 protected:
  void TearDown() override { ASSERT_OK(ForceSimdTarget("auto")); }
};

TEST_F(SimdTargetsTest, BestTargetIsChosen) {
  ASSERT_OK(ForceSimdTarget("auto"));

  ASSERT_FALSE(SimdTargets().empty());
  EXPECT_EQ(ChosenSimdTarget(), SimdTargets().front());
}

// Tests of kernels force these; what runs must be among them.
TEST_F(SimdTargetsTest, ChosenTargetIsOneThatTestsForce) {
  EXPECT_THAT(ChosenSimdTarget(), testing::AnyOf("avx512", "avx2", "sse4"));
}

TEST_F(SimdTargetsTest, EveryTargetCanBeForced) {
  for (const std::string_view target : SimdTargets()) {
    ASSERT_OK(ForceSimdTarget(target));
    EXPECT_EQ(ChosenSimdTarget(), target);
  }
}

TEST_F(SimdTargetsTest, UnknownTargetIsRefusedWithThoseThereAre) {
  const std::string last(SimdTargets().back());

  EXPECT_THAT(ForceSimdTarget("mmx"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("\"mmx\""), HasSubstr("auto"), HasSubstr(last))));
}

}  // namespace
}  // namespace ebbtide::gpu
