// SPDX-License-Identifier: Apache-2.0
//
// What watchers are told of sequences, lanes and tokens.

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "service/reason.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/service/cache_stand.h"

namespace ebbtide::service {
namespace {

using test::CacheStand;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int32_t kPage = 16;

std::vector<std::string> Names(const std::vector<SequenceSummary>& summaries) {
  std::vector<std::string> names;
  for (const SequenceSummary& summary : summaries) names.push_back(summary.sequence);
  return names;
}

class CacheWatchersTest : public testing::Test {
 protected:
  Cache& cache() { return stand_.cache(); }

  CacheStand stand_;
};

TEST_F(CacheWatchersTest, ListGoesOnAfterAName) {
  for (const std::string name : {"c", "a", "d", "b"}) stand_.Open(name);

  EXPECT_THAT(Names(cache().List("", 10)), ElementsAre("a", "b", "c", "d"));
  EXPECT_THAT(Names(cache().List("", 2)), ElementsAre("a", "b"));
  EXPECT_THAT(Names(cache().List("b", 2)), ElementsAre("c", "d"));
  EXPECT_THAT(Names(cache().List("bb", 1)), ElementsAre("c"));
  EXPECT_THAT(cache().List("d", 10), IsEmpty());
  EXPECT_THAT(cache().List("", 0), IsEmpty());
}

TEST_F(CacheWatchersTest, SummarySaysWhatItIsAndHowLongItRested) {
  stand_.Open("a", 64, 32);
  stand_.Append("a", 0, kPage + 4);
  stand_.Carry();
  stand_.clock().Advance(absl::Seconds(7));

  const SequenceSummary summary = cache().List("", 1).front();

  EXPECT_EQ(summary.model, "m");
  EXPECT_EQ(summary.policy, "streaming(sinks=4,recent=16)");
  EXPECT_EQ(summary.recall, "exact");
  EXPECT_EQ(summary.prefill, "exact");
  EXPECT_EQ(summary.committed, static_cast<uint64_t>(kPage + 4));
  EXPECT_EQ(summary.budget_tokens, 64U);
  EXPECT_EQ(summary.device_bytes, cache().DeviceReport().used_bytes);
  EXPECT_EQ(summary.idle, absl::Seconds(7));
  EXPECT_EQ(summary.tokens.device, 4U * (kPage + 4));
  EXPECT_EQ(summary.tokens.host, 4U * kPage);
  EXPECT_EQ(summary.tokens.open, 4U * 4);
}

TEST_F(CacheWatchersTest, TokensAreThoseOfAllSequences) {
  stand_.Open("a");
  stand_.Open("b");
  stand_.Append("a", 0, kPage);
  stand_.Carry();
  stand_.Append("b", 0, 3);

  const TokensByTier tokens = cache().Tokens();

  EXPECT_EQ(tokens.device, 4U * (kPage + 3));
  EXPECT_EQ(tokens.host, 4U * kPage);
  EXPECT_EQ(tokens.rocksdb, 0U);
  EXPECT_EQ(tokens.open, 4U * 3);
}

TEST_F(CacheWatchersTest, LanesAreDescribedByLayerAndHead) {
  stand_.Open("a");
  stand_.Append("a", 0, kPage);
  const Ticket ticket = stand_.Begin("a", 0, kPage, 2);
  stand_.Place(ticket, {3, 4, 5});
  stand_.Finish(ticket);

  ASSERT_OK_AND_ASSIGN(const SequenceDescription description,
                       cache().Describe({.sequence = "a", .with_lanes = true}));

  EXPECT_THAT(description.layer_lengths, ElementsAre(kPage + 2, kPage));
  ASSERT_EQ(description.lanes.size(), 4U);
  EXPECT_EQ(description.lanes[1].layer, 0U);
  EXPECT_EQ(description.lanes[1].kv_head, 1U);
  EXPECT_EQ(description.lanes[1].length, static_cast<uint64_t>(kPage + 2));
  EXPECT_EQ(description.lanes[1].resident, static_cast<uint32_t>(kPage + 2 - 3));
  EXPECT_EQ(description.lanes[1].absent, 3U);
  EXPECT_EQ(description.lanes[1].demoted, 3U);
  EXPECT_EQ(description.lanes[2].layer, 1U);
  EXPECT_EQ(description.lanes[2].length, static_cast<uint64_t>(kPage));
  EXPECT_EQ(description.lanes[2].absent, 0U);
  EXPECT_THAT(description.tokens, IsEmpty());
}

TEST_F(CacheWatchersTest, TokensOfALaneSayWhereTheyLieAndWhyTheyStay) {
  const SequenceRef sequence = stand_.Open("a");
  stand_.Append("a", 0, 3 * kPage + 2);
  stand_.Carry();
  stand_.Append("a", 3 * kPage + 2, 1, {9});
  std::vector<float>& score = sequence->memory[2].score;  // Layer 1, kv head 0.
  score.resize(3 * kPage + 3);
  score[8] = 0.5F;

  ASSERT_OK_AND_ASSIGN(
      const SequenceDescription description,
      cache().Describe({.sequence = "a", .with_tokens = true, .layer = 1, .kv_head = 0}));

  EXPECT_THAT(description.lanes, IsEmpty());
  ASSERT_EQ(description.tokens.size(), static_cast<size_t>(3 * kPage + 3));
  EXPECT_EQ(description.tokens[8].index, 8U);
  EXPECT_EQ(description.tokens[8].position, 8);
  EXPECT_EQ(description.tokens[8].score, 0.5F);
  EXPECT_EQ(description.tokens[8].why, "score");
  EXPECT_TRUE(description.tokens[8].resident);
  EXPECT_FALSE(description.tokens[9].resident);
  EXPECT_EQ(description.tokens[9].tier, TierName::kHost);
  EXPECT_EQ(description.tokens[0].why, "sink");
  EXPECT_EQ(description.tokens[3 * kPage + 2].why, "recent");
  EXPECT_EQ(description.tokens[3 * kPage + 2].tier, TierName::kDevice);  // Of an open block.
}

TEST_F(CacheWatchersTest, LaneOutOfRangeAndUnknownSequencesAreRefused) {
  stand_.Open("a");
  const auto refused = [&](const DescribeArgs& args, absl::StatusCode code) {
    const absl::Status status = cache().Describe(args).status();
    EXPECT_EQ(status.code(), code) << status;
    return ReasonOf(status);
  };

  EXPECT_EQ(refused({.sequence = "b"}, absl::StatusCode::kNotFound), "SEQUENCE_UNKNOWN");
  EXPECT_EQ(refused({.sequence = "a", .with_tokens = true, .layer = 2},
                    absl::StatusCode::kInvalidArgument),
            "LANE_OUT_OF_RANGE");
  EXPECT_EQ(refused({.sequence = "a", .with_tokens = true, .kv_head = 2},
                    absl::StatusCode::kInvalidArgument),
            "LANE_OUT_OF_RANGE");
  EXPECT_OK(cache().Describe({.sequence = "a", .layer = 2}).status());  // Nobody asked for it.
}

TEST_F(CacheWatchersTest, TokensOfALayerUnderACallAreNotReadNow) {
  stand_.Open("a");
  const Ticket ticket = stand_.Begin("a", 0, 0, 1);

  EXPECT_THAT(cache().Describe({.sequence = "a", .with_tokens = true, .layer = 0}),
              test::StatusIs(absl::StatusCode::kUnavailable,
                             AllOf(HasSubstr("layer 0"), HasSubstr("retry"))));
  EXPECT_OK(cache().Describe({.sequence = "a", .with_tokens = true, .layer = 1}).status());
  EXPECT_OK(cache().Describe({.sequence = "a", .with_lanes = true}).status());
}

TEST_F(CacheWatchersTest, CountersAreKeptAndSequencesCounted) {
  stand_.Open("a");
  stand_.Open("b");

  cache().Count([](Stats& stats) { stats.answers += 3; });
  cache().Count([](Stats& stats) { ++stats.refused["INDEX_GAP"]; });

  const Stats stats = cache().Counters();
  EXPECT_EQ(stats.answers, 3U);
  EXPECT_EQ(stats.refused.at("INDEX_GAP"), 1U);
  EXPECT_EQ(stats.sequences, 2U);
}

TEST_F(CacheWatchersTest, DeviceReportIsOfTheWholePool) {
  EXPECT_EQ(cache().DeviceReport().tier, TierName::kDevice);
  EXPECT_EQ(cache().DeviceReport().budget_bytes, stand_.pool().size());
  EXPECT_EQ(cache().DeviceReport().used_bytes, 0U);
}

}  // namespace
}  // namespace ebbtide::service
