// SPDX-License-Identifier: Apache-2.0
//
// A tier that fails is given no more to write until a probe finds it well, and says why all the
// while; erasures and reads pass. That it is a tier at all: tests/contract/.

#include "storage/circuit_breaker.h"

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "base/log.h"
#include "storage/byte_budget.h"
#include "storage/host/host_tier.h"
#include "tests/support/fake_clock.h"
#include "tests/support/faulty_tier.h"
#include "tests/support/record_pattern.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::storage {
namespace {

using test::FaultyTier;
using test::MakeGeometry;
using test::MakeRecord;
using test::StatusIs;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr BlockKey kKey = {1, 0, 0};

class CircuitBreakerTest : public testing::Test {
 protected:
  CircuitBreakerTest() { SetUpLog({.form = LogForm::kText, .fd = ::fileno(log_)}); }
  ~CircuitBreakerTest() override {
    SetUpLog({});
    std::fclose(log_);
  }

  absl::Status Write() {
    const BlockWrite write = {.key = kKey, .record = record_};
    return breaker_.Write({&write, 1});
  }
  absl::Status Read() {
    PageRead read = {.key = kKey, .page = 0, .into = page_};
    return breaker_.Read({&read, 1}, absl::InfiniteDuration());
  }
  absl::Status Erase() { return breaker_.Erase({&kKey, 1}); }
  void FailARead() {
    medium_.Set({.refuse = 1});
    EXPECT_THAT(Read(), StatusIs(absl::StatusCode::kUnavailable, "faulty tier: read refused"));
    medium_.Set({});
  }
  void FailAWrite() {
    medium_.Set({.refuse = 1});
    EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kUnavailable, "faulty tier: write refused"));
    medium_.Set({});
  }
  std::vector<std::string> LogLines() {
    EXPECT_TRUE(FlushLog(absl::Seconds(10)));
    std::string text;
    std::rewind(log_);
    for (int c = std::fgetc(log_); c != EOF; c = std::fgetc(log_))
      text.push_back(static_cast<char>(c));
    return absl::StrSplit(text, '\n', absl::SkipEmpty());
  }

  std::FILE* const log_ = std::tmpfile();
  const RecordGeometry geometry_ = MakeGeometry(2, 2, 4096);
  const std::vector<std::byte> record_ = MakeRecord(kKey, geometry_);
  std::vector<std::byte> page_ = std::vector<std::byte>(4096);
  test::FakeClock clock_;
  ByteBudget budget_{8 << 20};
  std::unique_ptr<HostTier> host_ = *HostTier::Create(budget_);
  FaultyTier medium_{*host_, 1};
  CircuitBreaker breaker_{medium_, clock_};
};

TEST_F(CircuitBreakerTest, AfterAFailureNothingIsWrittenUntilAProbeFindsItWell) {
  FailAWrite();
  EXPECT_EQ(breaker_.why_no_writes(), "faulty tier: write refused");
  EXPECT_EQ(breaker_.why_degraded(), "faulty tier: write refused");

  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("nothing is written")));
  EXPECT_EQ(host_->Usage().blocks, 0U);
  EXPECT_OK(Erase());  // It may be what makes room.
  EXPECT_NE(breaker_.why_no_writes(), "");

  EXPECT_OK(breaker_.Probe());
  EXPECT_EQ(breaker_.why_no_writes(), "");
  EXPECT_EQ(breaker_.why_degraded(), "");
  EXPECT_OK(Write());
  EXPECT_OK(Erase());
}

TEST_F(CircuitBreakerTest, AProbeThatFailsSaysWhyFromNowOn) {
  medium_.Set({.refuse = 1});
  EXPECT_THAT(Erase(), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(breaker_.why_no_writes(), "faulty tier: erase refused");

  EXPECT_THAT(breaker_.Probe(), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(breaker_.why_no_writes(), "faulty tier: probe refused");
}

TEST_F(CircuitBreakerTest, AReadThatFailsIsToldForAMinuteAndStopsNothing) {
  ASSERT_OK(Write());
  FailARead();

  EXPECT_EQ(breaker_.why_no_writes(), "");
  EXPECT_OK(Write());
  EXPECT_OK(Read());            // Of another sector, it may be,
  EXPECT_OK(breaker_.Probe());  // and this reads nothing that is held.
  clock_.Advance(absl::Seconds(59));
  EXPECT_EQ(breaker_.why_degraded(), "faulty tier: read refused");
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(breaker_.why_degraded(), "");
}

TEST_F(CircuitBreakerTest, ReadsThatGoWellSayNothingOfWrites) {
  ASSERT_OK(Write());
  FailAWrite();

  EXPECT_OK(Read());
  EXPECT_EQ(breaker_.why_no_writes(), "faulty tier: write refused");
}

// One bad sector, among reads that go well.
TEST_F(CircuitBreakerTest, ReadsThatFailAreLoggedOnceAMinute) {
  ASSERT_OK(Write());
  for (int second = 0; second < 61; ++second) {
    FailARead();
    EXPECT_OK(Read());
    EXPECT_OK(breaker_.Probe());
    clock_.Advance(absl::Seconds(1));
  }

  EXPECT_THAT(LogLines(), ElementsAre(AllOf(HasSubstr("tier does not read what it holds"),
                                            HasSubstr("read refused"), HasSubstr("failures=1")),
                                      HasSubstr("failures=60")));
}

// A disk that takes what a probe writes and not what else is written.
TEST_F(CircuitBreakerTest, ATierThatIsDegradedNowAndThenIsLoggedOnceAMinute) {
  for (int second = 0; second < 61; ++second) {
    FailAWrite();
    EXPECT_OK(breaker_.Probe());
    clock_.Advance(absl::Seconds(1));
  }

  EXPECT_THAT(LogLines(), ElementsAre(AllOf(HasSubstr("tier is degraded"),
                                            HasSubstr("write refused"), HasSubstr("failures=1")),
                                      HasSubstr("tier is well again"),
                                      AllOf(HasSubstr("is degraded"), HasSubstr("failures=60")),
                                      HasSubstr("tier is well again")));
}

// Also where there is room again by the time that anybody could look.
TEST_F(CircuitBreakerTest, ABudgetThatIsUsedUpIsNoFault) {
  medium_.Set({.full = 1});
  ASSERT_GT(budget_.free_bytes(), 2 * record_.size());

  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kResourceExhausted));

  EXPECT_EQ(breaker_.why_degraded(), "");
  medium_.Set({});
  EXPECT_OK(Write());
}

}  // namespace
}  // namespace ebbtide::storage
