// SPDX-License-Identifier: Apache-2.0
//
// Which reason a worker is given for an error of the device, which knows none.

#include "service/reason.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/host_memory_full.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::service {
namespace {

using absl::StatusCode;
using test::StatusIs;

TEST(ReasonTest, IsThatOfTheRefusal) {
  EXPECT_EQ(ReasonOf(Refuse(StatusCode::kNotFound, "SEQUENCE_UNKNOWN", "no \"a\"")),
            "SEQUENCE_UNKNOWN");
  EXPECT_EQ(ReasonOf(absl::NotFoundError("no \"a\"")), "");
  EXPECT_EQ(ReasonOf(absl::OkStatus()), "");
}

TEST(ReasonTest, ADevicesErrorGetsTheReasonOfItsKindAndKeepsTheRest) {
  struct Case {
    absl::Status status;
    std::string reason;
  };
  const std::vector<Case> table = {
      {absl::ResourceExhaustedError("32 B are free"), "DEVICE_FULL"},
      {gpu::HostMemoryFull("pinned memory"), "HOST_MEMORY_FULL"},
      {absl::UnavailableError("attend: cudaErrorLaunchFailure"), "DEVICE_LOST"},
      {absl::InternalError("attend: cudaErrorInvalidPtx"), "DEVICE_REFUSED"},
      {absl::InvalidArgumentError("what no device answers"), "DEVICE_REFUSED"},
  };
  for (const Case& c : table) {
    const absl::Status named = WithDeviceReason(c.status);
    EXPECT_EQ(ReasonOf(named), c.reason);
    EXPECT_THAT(named, StatusIs(c.status.code(), testing::StrEq(std::string(c.status.message()))));
  }
}

TEST(ReasonTest, AnErrorWithAReasonKeepsIt) {
  const absl::Status full = Refuse(StatusCode::kResourceExhausted, "LOWER_TIERS_FULL", "no room");
  EXPECT_EQ(WithDeviceReason(full), full);
  EXPECT_EQ(ReasonOf(WithDeviceReason(full)), "LOWER_TIERS_FULL");
  EXPECT_OK(WithDeviceReason(absl::OkStatus()));
}

}  // namespace
}  // namespace ebbtide::service
