// SPDX-License-Identifier: Apache-2.0
//
// A tier that fails is asked no more until a probe finds it well, and says why all the while. That
// it is a tier at all: tests/contract/.

#include "storage/circuit_breaker.h"

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "storage/byte_budget.h"
#include "storage/host/host_tier.h"
#include "tests/support/faulty_tier.h"
#include "tests/support/record_pattern.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::storage {
namespace {

using test::FaultyTier;
using test::MakeGeometry;
using test::MakeRecord;
using test::StatusIs;
using testing::HasSubstr;

constexpr BlockKey kKey = {1, 0, 0};

class CircuitBreakerTest : public testing::Test {
 protected:
  absl::Status Write() {
    const BlockWrite write = {.key = kKey, .record = record_};
    return breaker_.Write({&write, 1});
  }
  absl::Status Read() {
    PageRead read = {.key = kKey, .page = 0, .into = page_};
    return breaker_.Read({&read, 1}, absl::InfiniteDuration());
  }
  absl::Status Erase() { return breaker_.Erase({&kKey, 1}); }

  const RecordGeometry geometry_ = MakeGeometry(2, 2, 4096);
  const std::vector<std::byte> record_ = MakeRecord(kKey, geometry_);
  std::vector<std::byte> page_ = std::vector<std::byte>(4096);
  ByteBudget budget_{8 << 20};
  std::unique_ptr<HostTier> host_ = *HostTier::Create(budget_);
  FaultyTier medium_{*host_, 1};
  CircuitBreaker breaker_{medium_};
};

TEST_F(CircuitBreakerTest, AfterAFailureNothingIsWrittenUntilAProbeFindsItWell) {
  medium_.Set({.refuse = 1});
  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kUnavailable, "faulty tier: write refused"));
  EXPECT_EQ(breaker_.why(), "faulty tier: write refused");
  medium_.Set({});

  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("nothing is written")));
  EXPECT_THAT(Erase(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("nothing is written")));
  EXPECT_EQ(host_->Usage().blocks, 0U);

  EXPECT_OK(breaker_.Probe());
  EXPECT_EQ(breaker_.why(), "");
  EXPECT_OK(Write());
  EXPECT_OK(Erase());
}

TEST_F(CircuitBreakerTest, AProbeThatFailsSaysWhyFromNowOn) {
  medium_.Set({.refuse = 1});
  EXPECT_THAT(Erase(), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(breaker_.why(), "faulty tier: erase refused");

  EXPECT_THAT(breaker_.Probe(), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(breaker_.why(), "faulty tier: probe refused");
}

TEST_F(CircuitBreakerTest, ReadsThatFailAreToldAndStopNothing) {
  ASSERT_OK(Write());
  medium_.Set({.refuse = 1});
  EXPECT_THAT(Read(), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(breaker_.why(), "faulty tier: read refused");
  medium_.Set({});

  EXPECT_OK(Write());
  EXPECT_EQ(breaker_.why(), "faulty tier: read refused");  // A write tells nothing of reads.
  EXPECT_OK(Read());
  EXPECT_EQ(breaker_.why(), "");
}

TEST_F(CircuitBreakerTest, ReadsThatGoWellSayNothingOfWrites) {
  ASSERT_OK(Write());
  medium_.Set({.refuse = 1});
  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kUnavailable));
  medium_.Set({});

  EXPECT_OK(Read());
  EXPECT_EQ(breaker_.why(), "faulty tier: write refused");
}

// Also where there is room again by the time that anybody could look.
TEST_F(CircuitBreakerTest, ABudgetThatIsUsedUpIsNoFault) {
  medium_.Set({.full = 1});
  ASSERT_GT(budget_.free_bytes(), 2 * record_.size());

  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kResourceExhausted));

  EXPECT_EQ(breaker_.why(), "");
  medium_.Set({});
  EXPECT_OK(Write());
}

}  // namespace
}  // namespace ebbtide::storage
