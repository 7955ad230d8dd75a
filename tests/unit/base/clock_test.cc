// SPDX-License-Identifier: Apache-2.0
//
// The machine's clock and the one that tests move.

#include "base/clock.h"

#include "absl/time/time.h"
#include "gtest/gtest.h"

#include "tests/support/fake_clock.h"

namespace ebbtide {
namespace {

TEST(SteadyClockTest, NeverGoesBack) {
  absl::Duration last = SteadyClock().SinceStart();
  for (int i = 0; i < 10'000; ++i) {
    const absl::Duration now = SteadyClock().SinceStart();
    ASSERT_GE(now, last);
    last = now;
  }
}

TEST(FakeClockTest, MovesOnlyWhenTold) {
  test::FakeClock clock;
  const absl::Duration start = clock.SinceStart();

  EXPECT_EQ(clock.SinceStart(), start);
  clock.Advance(absl::Milliseconds(250));

  EXPECT_EQ(clock.SinceStart() - start, absl::Milliseconds(250));
}

}  // namespace
}  // namespace ebbtide
