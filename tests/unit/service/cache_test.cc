// SPDX-License-Identifier: Apache-2.0
//
// What the model promises, charges and gives back, call by call, with time under the test's hand.

#include "service/cache.h"

#include <cstddef>
#include <limits>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "service/reason.h"
#include "tests/support/engine_stand.h"
#include "tests/support/fake_clock.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/service/cache_stand.h"

namespace ebbtide::service {
namespace {

using test::StatusIs;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr absl::Duration kIdle = absl::Minutes(1);

class CacheTest : public testing::Test {
 protected:
  CacheTest()
      : pool_(1 << 20),
        cache_({.device_budget_bytes = pool_.size(),
                .default_recall = "off",
                .idle_timeout = kIdle,
                .look_at_room = [](auto sizes) { return test::RoomFor(1000, sizes); }},
               clock_) {
    EXPECT_OK(cache_.RegisterModel("m", test::SmallGeometry(), "").status());
    Open(std::numeric_limits<uint64_t>::max());
  }

  void Open(uint64_t charged_bytes) {
    const OpenArgs args = {
        .sequence = "a", .model = "m", .policy = "h2o", .budget_tokens = 64, .chunk_tokens = 64};
    EXPECT_OK(cache_.Open(args, {.pool = pool_.data(), .charged_bytes = charged_bytes}).status());
  }

  Ticket Begin(uint32_t layer, uint64_t first, int32_t tokens) {
    Lengths lengths;
    auto ticket = cache_.Begin(*cache_.Find("a"),
                               {.layer = layer, .first_index = first, .tokens = tokens}, &lengths);
    EXPECT_OK(ticket.status());
    return *std::move(ticket);
  }

  Cache::Need Place(const Ticket& ticket) {
    const std::vector<std::vector<int32_t>> victims(2);
    std::vector<std::vector<int32_t>> slots;
    EXPECT_OK(cache_.AwaitSlots(ticket, victims, clock_.SinceStart()));
    const auto need = cache_.Place(ticket, {.victims = victims, .positions = {}}, &slots);
    EXPECT_OK(need.status());
    return *need;
  }

  void Finish(const Ticket& ticket) {
    Lengths lengths;
    cache_.Finish(ticket, {}, 0, &lengths);
  }

  void Append(uint64_t first, int32_t tokens) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const Ticket ticket = Begin(layer, first, tokens);
      Place(ticket);
      Finish(ticket);
    }
  }

  size_t Blocks() { return (*cache_.Find("a"))->facts.blocks.size(); }

  test::FakeClock clock_;
  std::vector<std::byte> pool_;
  Cache cache_;
};

TEST_F(CacheTest, LayersOfOneStepThatComeTogetherNeedItsBlocksOnce) {
  const Ticket first = Begin(0, 0, 20);
  const Ticket second = Begin(1, 0, 20);
  ASSERT_EQ(cache_.NeedOf(first).blocks, 2);
  ASSERT_EQ(cache_.NeedOf(second).blocks, 2);

  const uint64_t at_open = cache_.metadata_bytes();
  const Cache::Need by_first = Place(first);
  const Cache::Need by_second = Place(second);

  EXPECT_EQ(by_first.blocks, 2);
  EXPECT_EQ(by_second.blocks, 0);
  EXPECT_EQ(Blocks(), 2U);
  EXPECT_EQ(cache_.metadata_bytes(), at_open + by_first.metadata_bytes);
  Finish(first);
  Finish(second);
  cache_.CheckInvariants();
}

TEST_F(CacheTest, TruncateGivesBackWhatTheBlocksItDropsTook) {
  Append(0, 18);
  const size_t blocks = Blocks();
  const uint64_t metadata = cache_.metadata_bytes();

  for (int round = 0; round < 3; ++round) {
    const Ticket ticket = Begin(0, 18, 40);  // Tokens of three blocks more, in one layer.
    const Cache::Need need = Place(ticket);
    Finish(ticket);
    ASSERT_EQ(need.blocks, 2);
    ASSERT_EQ(Blocks(), blocks + 2);
    cache_.CheckInvariants();

    const auto truncated = cache_.Truncate("a", 18);

    ASSERT_OK(truncated.status());
    EXPECT_EQ(truncated->metadata_bytes, need.metadata_bytes);
    EXPECT_EQ(Blocks(), blocks);
    cache_.CheckInvariants();
    EXPECT_EQ(cache_.metadata_bytes(), metadata);
  }
  cache_.CheckInvariants();
}

TEST_F(CacheTest, TruncateWithinABlockGivesNothingBack) {
  Append(0, 24);

  const auto truncated = cache_.Truncate("a", 17);

  ASSERT_OK(truncated.status());
  EXPECT_EQ(truncated->metadata_bytes, 0U);
  cache_.CheckInvariants();
}

TEST_F(CacheTest, ModelWhoseRecordsWouldBeTooLargeIsRefusedWithItsReason) {
  Geometry geometry = test::SmallGeometry();
  geometry.layers = kLayersMax;
  geometry.kv_heads = geometry.query_heads = kKvHeadsMax;

  const auto refused = cache_.RegisterModel("large", geometry, "");

  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("is 1048576")));
  EXPECT_EQ(ReasonOf(refused.status()), "GEOMETRY_INVALID");
}

TEST_F(CacheTest, IndicesThatWrapAroundAreBeyondTheLongestSequence) {
  Append(0, 20);
  const auto refused = StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("holds at most"));
  constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
  const auto sequence = cache_.Find("a");
  ASSERT_OK(sequence.status());
  for (const uint64_t first : {kMax, kMax - 3, kMax / 2 + 1, uint64_t{kSequenceTokensMax} - 7}) {
    Lengths lengths;
    BeginArgs args{.first_index = first, .queries = 8};
    EXPECT_THAT(cache_.Begin(*sequence, args, &lengths), refused) << first;
    args.tokens = 8;
    EXPECT_THAT(cache_.Begin(*sequence, args, &lengths), refused) << first;
  }
  cache_.CheckInvariants();
}

TEST_F(CacheTest, SequenceIsNotIdleWhileACallOfItRunsNorRightAfter) {
  const Ticket ticket = Begin(0, 0, 1);
  clock_.Advance(2 * kIdle);
  EXPECT_THAT(cache_.Idle(), IsEmpty());

  cache_.Abandon(ticket);  // As ReadPages and refused calls end.

  EXPECT_THAT(cache_.Idle(), IsEmpty());
  clock_.Advance(kIdle);
  EXPECT_THAT(cache_.Idle(), ElementsAre("a"));
}

TEST_F(CacheTest, LongAppendCountsFromItsEnd) {
  const Ticket ticket = Begin(0, 0, 1);
  Place(ticket);
  clock_.Advance(2 * kIdle);

  Finish(ticket);

  EXPECT_THAT(cache_.Idle(), IsEmpty());
}

// A watcher that polls must not keep what its worker left behind.
TEST_F(CacheTest, WatchingASequenceDoesNotKeepItAlive) {
  clock_.Advance(kIdle);

  EXPECT_EQ(cache_.List("", 10).size(), 1U);
  EXPECT_OK(cache_.Describe({.sequence = "a", .with_lanes = true, .with_tokens = true}).status());

  EXPECT_THAT(cache_.Idle(), ElementsAre("a"));
}

TEST_F(CacheTest, SequenceThatWasCalledSinceItWasFoundIdleStaysOpen) {
  clock_.Advance(kIdle);
  ASSERT_THAT(cache_.Idle(), ElementsAre("a"));

  cache_.Abandon(Begin(0, 0, 1));

  EXPECT_FALSE(cache_.CloseIdle("a").has_value());
  EXPECT_OK(cache_.Find("a"));
}

TEST_F(CacheTest, SequenceOpenedAnewUnderAnIdleOnesNameStaysOpen) {
  clock_.Advance(kIdle);
  ASSERT_THAT(cache_.Idle(), ElementsAre("a"));
  ASSERT_OK(cache_.Close("a", "CLOSED"));
  Open(std::numeric_limits<uint64_t>::max());

  EXPECT_FALSE(cache_.CloseIdle("a").has_value());
  EXPECT_OK(cache_.Find("a"));
}

TEST_F(CacheTest, IdleSequenceIsClosedAndCountedAsSuch) {
  Append(0, 3);
  clock_.Advance(kIdle);

  EXPECT_TRUE(cache_.CloseIdle("a").has_value());

  EXPECT_FALSE(cache_.CloseIdle("a").has_value());
  EXPECT_EQ(cache_.Counters().tokens_forgotten.at("IDLE"), 3U * 4);
  EXPECT_THAT(cache_.Find("a").status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("idle for its time-out")));
  EXPECT_THAT(cache_.Find("b").status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("no sequence \"b\" is open")));
}

TEST_F(CacheTest, NeedThatHasGrownOverWhatWasChargedIsRefused) {
  const Ticket first = Begin(0, 0, 20);
  Place(first);
  const Ticket second = Begin(1, 0, 20);
  const std::vector<std::vector<int32_t>> victims(2);
  std::vector<std::vector<int32_t>> slots;
  ASSERT_EQ(cache_.NeedOf(second).metadata_bytes, 0U);
  cache_.Withdraw(first);  // Its blocks are the second's to begin now.

  const auto need =
      cache_.Place(second, {.victims = victims, .positions = {}, .charged_bytes = 0}, &slots);

  EXPECT_THAT(need, StatusIs(absl::StatusCode::kUnavailable, HasSubstr("were withdrawn")));
  EXPECT_EQ(Blocks(), 0U);
  cache_.Abandon(second);
  cache_.CheckInvariants();
}

TEST_F(CacheTest, OpeningAgainKeepsItAlive) {
  clock_.Advance(kIdle);

  Open(0);

  EXPECT_THAT(cache_.Idle(), IsEmpty());
}

}  // namespace
}  // namespace ebbtide::service
