// SPDX-License-Identifier: Apache-2.0
//
// Attempts under a clock moved by hand: waiting advances it.

#include "client/cpp/src/retry.h"

#include <stop_token>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/fake_clock.h"

namespace ebbtide::client {
namespace {

class AttemptsTest : public testing::Test {
 protected:
  Attempts Make(const RetryPolicy& policy, absl::Duration timeout) {
    return Attempts(policy, timeout, clock_, [this](absl::Duration wait) {
      waits_.push_back(wait);
      clock_.Advance(wait);
    });
  }

  test::FakeClock clock_;
  std::vector<absl::Duration> waits_;
};

TEST_F(AttemptsTest, BackoffDoublesUpToItsLimit) {
  Attempts attempts = Make({.attempts_max = 5,
                            .backoff_first = absl::Milliseconds(10),
                            .backoff_max = absl::Milliseconds(30)},
                           absl::Seconds(60));

  while (attempts.Next()) {
  }

  EXPECT_EQ(waits_, (std::vector<absl::Duration>{absl::Milliseconds(10), absl::Milliseconds(20),
                                                 absl::Milliseconds(30), absl::Milliseconds(30)}));
  EXPECT_EQ(attempts.made(), 5);
}

TEST_F(AttemptsTest, OneAttemptIsNeverRepeated) {
  Attempts attempts = Make({.attempts_max = 1}, absl::Seconds(60));

  EXPECT_FALSE(attempts.Next());
  EXPECT_TRUE(waits_.empty());
}

TEST_F(AttemptsTest, NoAttemptIsBegunThatTheTimeLimitWouldCut) {
  Attempts attempts =
      Make({.attempts_max = 10, .backoff_first = absl::Milliseconds(40)}, absl::Milliseconds(100));

  EXPECT_TRUE(attempts.Next());
  EXPECT_FALSE(attempts.Next());  // 60 ms are left, the next backoff takes 80.
  EXPECT_EQ(waits_.size(), 1U);
  EXPECT_EQ(attempts.remaining(), absl::Milliseconds(60));
}

TEST_F(AttemptsTest, LooksAreNotCountedAndEndWithTheTimeLimit) {
  Attempts attempts =
      Make({.attempts_max = 2, .look_pause = absl::Milliseconds(3)}, absl::Milliseconds(100));

  while (attempts.NextLook()) {
  }

  EXPECT_EQ(attempts.looks(), 34);
  EXPECT_EQ(attempts.made(), 1);
  EXPECT_EQ(attempts.remaining(), absl::Milliseconds(1));
}

TEST_F(AttemptsTest, LooksWithoutAPauseOfTheirOwnAreAttempts) {
  Attempts attempts = Make({.attempts_max = 2}, absl::Seconds(60));

  EXPECT_TRUE(attempts.NextLook());
  EXPECT_FALSE(attempts.NextLook());
}

TEST_F(AttemptsTest, NoAttemptFollowsAStop) {
  std::stop_source stop;
  Attempts attempts(
      {.attempts_max = 10, .look_pause = absl::Milliseconds(3)}, absl::Seconds(60), clock_,
      [&](absl::Duration) { stop.request_stop(); }, stop.get_token());

  EXPECT_FALSE(attempts.Next());  // It came meanwhile.
  EXPECT_FALSE(attempts.NextLook());
  EXPECT_EQ(attempts.made(), 1);
  EXPECT_EQ(attempts.looks(), 1);
}

TEST_F(AttemptsTest, RemainingTimeIsNeverNegative) {
  const Attempts attempts = Make({}, absl::Seconds(1));

  clock_.Advance(absl::Seconds(2));

  EXPECT_EQ(attempts.remaining(), absl::ZeroDuration());
}

}  // namespace
}  // namespace ebbtide::client
