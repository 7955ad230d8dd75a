// SPDX-License-Identifier: Apache-2.0

#include "base/status_macros.h"

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"

#include "tests/support/status_matchers.h"

namespace ebbtide {
namespace {

using test::IsOkAndHolds;
using test::StatusIs;

absl::StatusOr<std::unique_ptr<int>> Make(bool is_made) {
  if (!is_made) {
    return absl::NotFoundError("nothing");
  }
  return std::make_unique<int>(7);
}

absl::StatusOr<int> Use(bool is_made) {
  EBBTIDE_ASSIGN_OR_RETURN(const std::unique_ptr<int> value, Make(is_made));
  EBBTIDE_ASSIGN_OR_RETURN(auto other, Make(true));
  return *value + *other;
}

absl::Status Pass(const absl::Status& status, bool& is_past) {
  EBBTIDE_RETURN_IF_ERROR(status);
  is_past = true;
  return absl::OkStatus();
}

TEST(AssignOrReturnTest, ValueIsMovedOut) {
  EXPECT_THAT(Use(true), IsOkAndHolds(14));
}

TEST(AssignOrReturnTest, ErrorLeavesUnchanged) {
  EXPECT_THAT(Use(false), StatusIs(absl::StatusCode::kNotFound, "nothing"));
}

TEST(ReturnIfErrorTest, ErrorLeavesUnchanged) {
  bool is_past = false;

  EXPECT_THAT(Pass(absl::AbortedError("moved on"), is_past),
              StatusIs(absl::StatusCode::kAborted, "moved on"));

  EXPECT_FALSE(is_past);
}

TEST(ReturnIfErrorTest, OkGoesOn) {
  bool is_past = false;

  EXPECT_OK(Pass(absl::OkStatus(), is_past));

  EXPECT_TRUE(is_past);
}

TEST(CheckDeathTest, BrokenContractNamesConditionAndReason) {
  EXPECT_DEATH(EBBTIDE_CHECK(1 + 1 == 3, "sums must hold"), "sums must hold.*1 \\+ 1 == 3");
}

}  // namespace
}  // namespace ebbtide
