// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/admission.h"

#include <optional>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "service/reason.h"
#include "tests/support/fake_clock.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::service {
namespace {

using test::IsOk;
using test::StatusIs;
using testing::AllOf;
using testing::HasSubstr;

class AdmissionTest : public testing::Test {
 protected:
  test::FakeClock clock_;
  Admission admission_{{.calls = 2, .bytes = 100, .advice = "wait a little"}, clock_};
};

TEST_F(AdmissionTest, CallOverTheBoundIsTurnedAwayUntilOneEnds) {
  std::optional<absl::StatusOr<Admission::Ticket>> first = admission_.Enter(0);
  const absl::StatusOr<Admission::Ticket> second = admission_.Enter(0);
  ASSERT_THAT(second, IsOk());

  const absl::Status third = admission_.Enter(0).status();
  EXPECT_THAT(third, StatusIs(absl::StatusCode::kResourceExhausted,
                              AllOf(HasSubstr("2 calls"), HasSubstr("; wait a little"))));
  EXPECT_EQ(ReasonOf(third), "SERVER_BUSY");

  first.reset();
  EXPECT_THAT(admission_.Enter(0), IsOk());
}

TEST_F(AdmissionTest, BytesAreBoundedButALargeCallAloneIsNot) {
  {
    const absl::StatusOr<Admission::Ticket> large = admission_.Enter(1000);
    ASSERT_THAT(large, IsOk());
  }
  const absl::StatusOr<Admission::Ticket> first = admission_.Enter(60);
  ASSERT_THAT(first, IsOk());

  const absl::Status second = admission_.Enter(41).status();
  EXPECT_THAT(second, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("41 B")));
  EXPECT_EQ(ReasonOf(second), "SERVER_BUSY");
  EXPECT_THAT(admission_.Enter(40), IsOk());
}

TEST_F(AdmissionTest, LargeCallInProgressLeavesNoBytesForOthers) {
  const absl::StatusOr<Admission::Ticket> large = admission_.Enter(1000);

  EXPECT_THAT(admission_.Enter(1), StatusIs(absl::StatusCode::kResourceExhausted));
  EXPECT_THAT(admission_.Enter(0), StatusIs(absl::StatusCode::kResourceExhausted));
}

TEST_F(AdmissionTest, AnswersAreBoundedWithRequestsButOneAloneIsNot) {
  {
    absl::StatusOr<Admission::Ticket> alone = admission_.Enter(10);
    ASSERT_THAT(alone, IsOk());
    EXPECT_THAT(alone->Grow(1000, "answer"), IsOk());
  }
  absl::StatusOr<Admission::Ticket> first = admission_.Enter(10);
  ASSERT_THAT(first, IsOk());
  ASSERT_THAT(first->Grow(50, "answer"), IsOk());
  absl::StatusOr<Admission::Ticket> second = admission_.Enter(0);
  ASSERT_THAT(second, IsOk());

  const absl::Status refused = second->Grow(41, "call's answer, as it is held,");
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted,
                                AllOf(HasSubstr("this call's answer, as it is held, of 41 B"),
                                      HasSubstr("hold 60 B"))));
  EXPECT_EQ(ReasonOf(refused), "SERVER_BUSY");
  EXPECT_THAT(second->Grow(40, "answer"), IsOk());
}

TEST_F(AdmissionTest, ClosedTurnsEveryoneAwayAndWaitsForThoseWithin) {
  std::optional<absl::StatusOr<Admission::Ticket>> within = admission_.Enter(0);
  admission_.Close();

  const absl::Status late = admission_.Enter(0).status();
  EXPECT_THAT(late, StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(ReasonOf(late), "SHUTTING_DOWN");
  EXPECT_FALSE(admission_.WaitIdle(absl::ZeroDuration()));

  std::thread leaver([&] { within.reset(); });
  EXPECT_TRUE(admission_.WaitIdle(absl::InfiniteDuration()));
  leaver.join();
}

TEST_F(AdmissionTest, StuckIsFullWithoutAnEnd) {
  EXPECT_EQ(admission_.StuckFor(), absl::ZeroDuration());
  const absl::StatusOr<Admission::Ticket> first = admission_.Enter(0);
  clock_.Advance(absl::Seconds(5));
  std::optional<absl::StatusOr<Admission::Ticket>> second = admission_.Enter(0);
  clock_.Advance(absl::Seconds(3));
  EXPECT_EQ(admission_.StuckFor(), absl::Seconds(3));

  second.reset();
  EXPECT_EQ(admission_.StuckFor(), absl::ZeroDuration());
  const absl::StatusOr<Admission::Ticket> third = admission_.Enter(0);
  EXPECT_EQ(admission_.StuckFor(), absl::ZeroDuration());
}

}  // namespace
}  // namespace ebbtide::service
