// SPDX-License-Identifier: Apache-2.0

#include "service/policy/scorer.h"

#include <bit>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/unit/service/scored_lane.h"

namespace ebbtide::service {
namespace {

using test::kUnseen;
using test::MakePolicy;
using test::Row;
using test::ScoredLane;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::FloatNear;
using testing::Ge;
using testing::IsEmpty;
using testing::Pointwise;
using testing::SizeIs;

const std::vector<std::string> kEveryPolicy = {
    "streaming(sinks=0)", "keydiff(sinks=0)",      "h2o(sinks=0)",
    "h2o(sinks=0)+caote", "tova(sinks=0)",         "tova(sinks=0)+fastcaote",
    "snapkv(sinks=0)",    "snapkv(sinks=0)+caote", "snapkv(sinks=0)+fastcaote"};

// The score says what it is told: snapkv's, as long as it is fresh.
Policy ToldPolicy(int32_t protected_tokens = 0) {
  return MakePolicy("snapkv(sinks=0)", protected_tokens);
}

void Tell(ScoredLane& lane, const std::vector<float>& score) {
  while (lane.length() < static_cast<int32_t>(score.size())) lane.Append({1, 0}, {0, 1});
  lane.memory().score = score;
  lane.memory().is_score_stale = false;
}

// --- who may leave

TEST(ProtectionTest, SinksNewestTokensAndTheOpenBlockStay) {
  ResolvedPolicy policy;
  policy.spec.sinks = 4;
  policy.protected_tokens = 4 + 16;

  EXPECT_EQ(ProtectionOf(policy, 0, 100, 96), "sink");
  EXPECT_EQ(ProtectionOf(policy, 3, 100, 96), "sink");
  EXPECT_EQ(ProtectionOf(policy, 4, 100, 96), "");
  EXPECT_EQ(ProtectionOf(policy, 83, 100, 96), "");
  EXPECT_EQ(ProtectionOf(policy, 84, 100, 96), "recent");
  EXPECT_EQ(ProtectionOf(policy, 99, 100, 96), "recent");
  EXPECT_EQ(ProtectionOf(policy, 48, 100, 48), "open block");
  EXPECT_EQ(ProtectionOf(policy, 47, 100, 48), "");
}

TEST(ChooseVictimsTest, LaneWithinItsBudgetLosesNobody) {
  ScoredLane lane;
  Tell(lane, {3, 1, 2});

  EXPECT_THAT(lane.Victims(ToldPolicy(), 3), IsEmpty());
  EXPECT_THAT(lane.Victims(ToldPolicy(), 4), IsEmpty());
}

TEST(ChooseVictimsTest, LowestScoresLeaveInAscendingOrder) {
  ScoredLane lane;
  Tell(lane, {3, 1, 5, 2, 4});

  EXPECT_THAT(lane.Victims(ToldPolicy(), 2), ElementsAre(1, 3, 0));
}

TEST(ChooseVictimsTest, OfEqualScoresTheOlderLeavesFirst) {
  ScoredLane lane;
  Tell(lane, {7, 0.0F, -0.0F, 0.0F, 7});

  EXPECT_THAT(lane.Victims(ToldPolicy(), 1), ElementsAre(1, 2, 3, 0));
}

TEST(ChooseVictimsTest, ProtectedTokensStayHoweverLowTheirScore) {
  ScoredLane lane;
  Tell(lane, {0, 5, 4, 3, 0, 0});
  const Policy policy = MakePolicy("snapkv(sinks=1)", 2);  // 0 is a sink, 4 and 5 are recent.

  EXPECT_THAT(lane.Victims(policy, 4), ElementsAre(3, 2));
}

TEST(ChooseVictimsTest, FewerLeaveWhereFewerMay) {
  ScoredLane lane;
  Tell(lane, {1, 2, 3, 4});

  EXPECT_THAT(lane.Victims(ToldPolicy(3), 1), ElementsAre(0));
}

TEST(ChooseVictimsTest, IncompleteTokensNeverLeave) {
  ScoredLane lane;
  Tell(lane, {4, 3, 2, 1});

  EXPECT_THAT(lane.Victims(ToldPolicy(), {.budget = 1, .length = 4, .candidate_end = 2}),
              ElementsAre(1, 0));
}

TEST(ChooseVictimsTest, AbsentTokensAreNeitherCountedNorChosen) {
  ScoredLane lane;
  Tell(lane, {0, 1, 2, 3});
  lane.Remove(0);

  EXPECT_THAT(lane.Victims(ToldPolicy(), 3), IsEmpty());
  EXPECT_THAT(lane.Victims(ToldPolicy(), 2), ElementsAre(1));
}

TEST(ChooseVictimsTest, SlotsOfTheTokensDoNotMatter) {
  ScoredLane straight;
  ScoredLane shuffled;
  for (int i = 0; i < 20; ++i) shuffled.Append({0, 0}, {0, 0});
  for (const int32_t index : {7, 3, 12, 0, 9}) shuffled.Remove(index);  // Leaves holes to fill.
  for (int i = 0; i < 5; ++i) shuffled.Append({0, 0}, {0, 0});
  for (int i = 0; i < 25; ++i) straight.Append({0, 0}, {0, 0});
  for (const int32_t index : {0, 3, 7, 9, 12}) straight.Remove(index);
  ASSERT_FALSE(std::ranges::equal(straight.lane().slot_index(), shuffled.lane().slot_index()));

  const Policy policy = MakePolicy("streaming(sinks=2)", 4);

  EXPECT_EQ(straight.Victims(policy, 8), shuffled.Victims(policy, 8));
}

// --- what bases say

TEST(ScorerTest, LogitsAreAskedForByThoseWhoAddUpAttention) {
  for (const std::string& text : kEveryPolicy) {
    const bool adds_up = text.starts_with("h2o") || text.starts_with("tova");
    EXPECT_EQ(MakePolicy(text).scorer->wants_logits(), adds_up) << text;
  }
}

TEST(ScorerTest, SlotsWithoutATokenScoreNothing) {
  std::mt19937_64 random(test::RandomSeed());
  std::normal_distribution<float> normal;
  for (const std::string& text : kEveryPolicy) {
    ScoredLane lane;
    for (int i = 0; i < 20; ++i) lane.Append({normal(random), 1}, {normal(random), 1});
    auto answer = lane.AnswerTo({{1, 1}}, {19});
    const Policy policy = MakePolicy(text);
    lane.Observe(policy, answer.Seen());
    lane.Remove(5);

    const std::vector<float> score = lane.BaseScores(policy);

    EXPECT_EQ(score[5], 0) << text;
    EXPECT_EQ(score[20], 0) << text;
  }
}

TEST(RecencyScorerTest, TokenIsWorthItsIndex) {
  ScoredLane lane;
  for (int i = 0; i < 3; ++i) lane.Append({1, 0}, {1, 0});

  EXPECT_THAT(lane.Scores(MakePolicy("streaming")), ElementsAre(0, 1, 2));
}

TEST(KeyDiffScorerTest, KeyIsWorthHowUnlikeTheMeanUnitKeyItIs) {
  ScoredLane lane;
  lane.Append({2, 0}, {0, 0});
  lane.Append({1, 0}, {0, 0});
  lane.Append({0, 3}, {0, 0});

  // Mean unit key (2/3, 1/3); cosines 2/√5, 2/√5 and 1/√5.
  const float root = std::sqrt(5.0F);
  EXPECT_THAT(lane.Scores(MakePolicy("keydiff")),
              Pointwise(FloatNear(1e-5F), {-2 / root, -2 / root, -1 / root}));
}

TEST(KeyDiffScorerTest, MeanIsThatOfTheWorkingSet) {
  ScoredLane lane;
  lane.Append({1, 0}, {0, 0});
  lane.Append({0, 1}, {0, 0});
  const Policy policy = MakePolicy("keydiff");
  const std::vector<float> both = lane.Scores(policy);

  lane.Remove(0);

  EXPECT_NEAR(both[1], -std::sqrt(0.5), 1e-5);
  EXPECT_NEAR(lane.Scores(policy)[1], -1, 1e-5);
}

TEST(H2oScorerTest, TokenIsWorthTheAttentionOfAllQueriesAveragedOverTheGroup) {
  ScoredLane lane(2);
  lane.Append({0, 0}, {0, 0});
  lane.Append({std::log(3.0F), 0}, {0, 0});
  // Group of two, two queries each: [1, 0] sees weights 1 : 3, [0, 0] equal ones. Query 0 sees
  // token 0 alone.
  auto answer = lane.AnswerTo({{1, 0}, {1, 0}, {0, 0}, {0, 0}}, {0, 1});
  const Policy policy = MakePolicy("h2o");

  lane.Observe(policy, answer.Seen());

  EXPECT_THAT(lane.Scores(policy), Pointwise(FloatNear(1e-5F), {1 + 0.375F, 0.625F}));
}

TEST(H2oScorerTest, AttentionToRecalledTokensIsTheirs) {
  ScoredLane lane;
  for (int i = 0; i < 3; ++i) lane.Append({0, 0}, {0, 0});
  lane.Remove(0);
  auto answer = lane.AnswerTo({{1, 0}}, {2});
  Observation seen = answer.Seen();
  const std::vector<int32_t> recalled = {0, gpu::kNoToken};
  const std::vector<float> logits = {std::log(2.0F), kUnseen};
  answer.parts.push_back({.index = recalled, .logits = logits});
  seen.parts = answer.parts;
  const float lse = std::log(4.0F);  // Over all three: weights 2 : 1 : 1.
  seen.lse = {&lse, 1};
  const Policy policy = MakePolicy("h2o");

  lane.Observe(policy, seen);

  EXPECT_THAT(lane.memory().mass, Pointwise(FloatNear(1e-5F), {0.5, 0.25, 0.25}));
}

TEST(TovaScorerTest, TokenIsWorthTheAttentionOfTheLastQueryAlone) {
  ScoredLane lane;
  lane.Append({0, 0}, {0, 0});
  lane.Append({std::log(3.0F), 0}, {0, 0});
  const Policy policy = MakePolicy("tova");
  auto first = lane.AnswerTo({{5, 5}, {0, 0}}, {0, 1});
  lane.Observe(policy, first.Seen());
  EXPECT_THAT(lane.Scores(policy), Pointwise(FloatNear(1e-5F), {0.5F, 0.5F}));

  auto second = lane.AnswerTo({{1, 0}}, {1});
  lane.Observe(policy, second.Seen());

  EXPECT_THAT(lane.Scores(policy), Pointwise(FloatNear(1e-5F), {0.25F, 0.75F}));
}

TEST(SnapKvScorerTest, WindowsAttentionIsPooledOverNeighbouringKeepers) {
  ScoredLane lane;
  lane.Append({std::log(4.0F), 0}, {0, 0});
  for (int i = 0; i < 3; ++i) lane.Append({0, 0}, {0, 0});
  lane.Append({std::log(2.0F), 0}, {0, 0});
  lane.Remove(1);  // So that token 2 is the neighbour of token 0,
  lane.Append({0, 0}, {0, 0});
  ASSERT_EQ(lane.lane().slot_of(5), 1);  // and token 5 is not, though its slot is.
  auto answer = lane.AnswerTo({{1, 0}}, {5});
  const Policy policy = MakePolicy("snapkv(window=2,kernel=3)");
  lane.Observe(policy, answer.Seen());

  const std::vector<float> score = lane.Scores(policy);  // Weights 4 : – : 1 : 1 : 2 : 1.

  EXPECT_NEAR(score[0], 4.0 / 9, 1e-5);
  EXPECT_NEAR(score[2], 4.0 / 9, 1e-5);
  EXPECT_NEAR(score[3], 2.0 / 9, 1e-5);
  EXPECT_NEAR(score[4], 2.0 / 9, 1e-5);
  EXPECT_NEAR(score[5], 2.0 / 9, 1e-5);
}

TEST(SnapKvScorerTest, OnlyTheLastWindowOfQueriesVotes) {
  ScoredLane lane;
  lane.Append({1, 0}, {0, 0});
  lane.Append({0, 1}, {0, 0});
  const Policy policy = MakePolicy("snapkv(window=2,kernel=1)");
  auto old = lane.AnswerTo({{9, 0}, {9, 0}, {9, 0}}, {1, 1, 1});
  auto last = lane.AnswerTo({{0, 9}, {0, 9}}, {1, 1});

  lane.Observe(policy, old.Seen());
  lane.Observe(policy, last.Seen());

  const std::vector<float> score = lane.Scores(policy);
  EXPECT_LT(score[0], 0.001);
  EXPECT_NEAR(score[1], 2, 0.001);  // Two queries, each nearly all.
}

TEST(SnapKvScorerTest, ScoreIsRenewedAfterPrefillCallsAndEverySixteenQueries) {
  ScoredLane lane;
  for (int i = 0; i < 40; ++i) lane.Append({1, 0}, {0, 0});
  const Policy policy = MakePolicy("snapkv");
  auto decode = lane.AnswerTo({{1, 0}}, {39});
  auto prefill = lane.AnswerTo({{1, 0}}, {39});
  prefill.ends_prefill_call = true;
  EXPECT_FALSE(policy.scorer->is_fresh(lane.memory()));
  lane.Scores(policy);
  EXPECT_TRUE(policy.scorer->is_fresh(lane.memory()));

  for (int query = 0; query < kWindowRefreshQueries - 1; ++query) {
    lane.Observe(policy, decode.Seen());
    EXPECT_TRUE(policy.scorer->is_fresh(lane.memory())) << query;
  }
  lane.Observe(policy, decode.Seen());
  EXPECT_FALSE(policy.scorer->is_fresh(lane.memory()));
  lane.Scores(policy);
  EXPECT_TRUE(policy.scorer->is_fresh(lane.memory()));
  lane.Observe(policy, prefill.Seen());

  EXPECT_FALSE(policy.scorer->is_fresh(lane.memory()));
}

TEST(SnapKvScorerTest, FreshScoresAreKept) {
  ScoredLane lane;
  Tell(lane, {5, 6, 7});

  EXPECT_THAT(lane.Scores(ToldPolicy()), ElementsAre(5, 6, 7));
}

// --- incremental use

TEST(ScorerTest, EveryOtherBaseIsNeverFresh) {
  ScoredLane lane;
  lane.Append({1, 0}, {1, 0});
  for (const std::string text : {"streaming", "keydiff", "h2o", "tova"}) {
    const Policy policy = MakePolicy(text);
    lane.Scores(policy);
    EXPECT_FALSE(policy.scorer->is_fresh(lane.memory())) << text;
  }
}

// Queries are observed in whatever portions calls bring them.
TEST(ScorerTest, PortionsOfQueriesDoNotMatter) {
  test::ForEachSeed(5, [](uint64_t seed) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    for (const std::string& text : kEveryPolicy) {
      ScoredLane at_once;
      ScoredLane in_portions;
      ScoredLane in_tiles;  // Of one call.
      std::vector<Row> query;
      std::vector<int32_t> query_index;
      for (int32_t i = 0; i < 40; ++i) {
        const Row key = {normal(random), normal(random)};
        const Row value = {normal(random), normal(random)};
        at_once.Append(key, value);
        in_portions.Append(key, value);
        in_tiles.Append(key, value);
        query.push_back({normal(random), normal(random)});
        query_index.push_back(i);
      }
      const Policy policy = MakePolicy(text);

      auto all = at_once.AnswerTo(query, query_index);
      at_once.Observe(policy, all.Seen());
      ScoreNotes notes;
      for (size_t first = 0; first < query.size();) {
        const size_t count = std::min<size_t>(1 + random() % 12, query.size() - first);
        auto some =
            in_portions.AnswerTo({query.begin() + static_cast<ptrdiff_t>(first),
                                  query.begin() + static_cast<ptrdiff_t>(first + count)},
                                 {query_index.begin() + static_cast<ptrdiff_t>(first),
                                  query_index.begin() + static_cast<ptrdiff_t>(first + count)});
        in_portions.Observe(policy, some.Seen());
        policy.scorer->Observe(some.Seen(), in_tiles.memory(), notes);
        first += count;
      }

      EXPECT_THAT(in_tiles.memory().mass, Each(0)) << text;  // Nothing before the call is certain.
      policy.scorer->Take(notes, in_tiles.memory());

      // Sums may be rounded in another order.
      EXPECT_THAT(in_portions.Scores(policy), Pointwise(FloatNear(1e-5F), at_once.Scores(policy)))
          << text;
      EXPECT_THAT(in_tiles.Scores(policy), Pointwise(FloatNear(1e-5F), at_once.Scores(policy)))
          << text;
    }
  });
}

TEST(ScorerTest, QueriesMarkedAsSeenCountForNothing) {
  for (const std::string text : {"h2o", "snapkv(window=4,kernel=1)"}) {
    ScoredLane lane;
    lane.Append({1, 0}, {0, 0});
    lane.Append({0, 1}, {0, 0});
    const Policy policy = MakePolicy(text);
    auto answer = lane.AnswerTo({{9, 0}, {0, 9}}, {1, 1});
    answer.lse[0] = kUnseen;  // Observed by an earlier call.

    lane.Observe(policy, answer.Seen());

    const std::vector<float> score = lane.Scores(policy);
    EXPECT_LT(score[0], 0.001) << text;
    EXPECT_NEAR(score[1], 1, 0.001) << text;
  }
}

TEST(ScorerTest, AbsentTokenKeepsItsLastScore) {
  for (const std::string& text : kEveryPolicy) {
    ScoredLane lane;
    lane.Append({1, 0}, {1, 0});
    lane.Append({0, 1}, {1, 0});
    lane.memory().score = {42, 43};
    lane.Remove(0);

    EXPECT_EQ(lane.Scores(MakePolicy(text))[0], 42) << text;
  }
}

TEST(ScorerTest, SameHistoryGivesTheSameScoresToTheBit) {
  const uint64_t seed = test::RandomSeed();
  for (const std::string& text : kEveryPolicy) {
    std::vector<std::vector<uint32_t>> runs;
    std::vector<std::vector<int32_t>> victims;
    for (int run = 0; run < 2; ++run) {
      std::mt19937_64 random(seed);
      std::normal_distribution<float> normal;
      ScoredLane lane(2);
      const Policy policy = MakePolicy(text, 16);
      for (int32_t i = 0; i < 90; ++i) {
        lane.Append({normal(random), normal(random)}, {normal(random), normal(random)});
        auto answer = lane.AnswerTo({{normal(random), 1}, {1, normal(random)}}, {i});
        lane.Observe(policy, answer.Seen());
        victims.push_back(lane.Victims(policy, 48));
        for (const int32_t victim : victims.back()) lane.Remove(victim);
      }
      runs.emplace_back();
      for (const float score : lane.Scores(policy)) {
        runs.back().push_back(std::bit_cast<uint32_t>(score));
      }
    }
    EXPECT_EQ(runs[0], runs[1]) << text;
    const auto half = static_cast<ptrdiff_t>(victims.size() / 2);
    EXPECT_TRUE(std::equal(victims.begin(), victims.begin() + half, victims.begin() + half))
        << text;
  }
}

// --- weighting by values

// h over the working set 1/2, 1/4, 1/4.
ScoredLane& LaneOfThree(ScoredLane& lane) {
  lane.Append({std::log(2.0F), 0}, {4, 0});
  lane.Append({0, 0}, {0, 4});
  lane.Append({0, 0}, {0, 0});
  return lane;
}

TEST(WeightingTest, CaoteIsTheErrorOfLosingTheToken) {
  ScoredLane lane;
  LaneOfThree(lane);
  const Policy policy = MakePolicy("tova+caote");
  auto answer = lane.AnswerTo({{1, 0}}, {2});
  lane.Observe(policy, answer.Seen());

  const std::vector<float> score = lane.Scores(policy);

  // Σhv = (2, 1); h/(1-h) = 1, 1/3, 1/3.
  EXPECT_NEAR(score[0], std::hypot(2, 1), 1e-4);
  EXPECT_NEAR(score[1], std::hypot(2, 3) / 3, 1e-4);
  EXPECT_NEAR(score[2], std::hypot(2, 1) / 3, 1e-4);
}

TEST(WeightingTest, FastCaotePutsTheMeanValueInPlaceOfTheOutput) {
  ScoredLane lane;
  LaneOfThree(lane);
  const Policy policy = MakePolicy("tova+fastcaote");
  auto answer = lane.AnswerTo({{1, 0}}, {2});
  lane.Observe(policy, answer.Seen());

  const std::vector<float> score = lane.Scores(policy);

  const double mean = 4.0 / 3;
  EXPECT_NEAR(score[0], std::hypot(4 - mean, mean), 1e-4);
  EXPECT_NEAR(score[1], std::hypot(mean, 4 - mean) / 3, 1e-4);
  EXPECT_NEAR(score[2], std::hypot(mean, mean) / 3, 1e-4);
}

TEST(WeightingTest, BaseIsNormalisedOverTheWorkingSet) {
  ScoredLane lane;
  LaneOfThree(lane);
  const Policy policy = MakePolicy("h2o+caote");
  auto answer = lane.AnswerTo({{1, 0}}, {2});
  for (int times = 0; times < 3; ++times) lane.Observe(policy, answer.Seen());

  EXPECT_NEAR(lane.Scores(policy)[0], std::hypot(2, 1), 1e-4);  // As after one answer.
}

TEST(WeightingTest, WithNothingObservedTheOldestLeaveFirst) {
  for (const std::string text :
       {"h2o(sinks=0)+caote", "snapkv(sinks=0)+caote", "tova(sinks=0)+fastcaote"}) {
    ScoredLane lane;
    for (int i = 0; i < 6; ++i) lane.Append({1, 0}, {static_cast<float>(6 - i), 0});

    EXPECT_THAT(lane.Victims(MakePolicy(text), 4), ElementsAre(0, 1)) << text;
  }
}

TEST(WeightingTest, OneTokenWithAllTheAttentionHasAFiniteScore) {
  for (const std::string text : {"tova+caote", "tova+fastcaote"}) {
    ScoredLane lane;
    lane.Append({100, 0}, {3, 0});
    lane.Append({0, 0}, {0, 4});
    const Policy policy = MakePolicy(text);
    auto answer = lane.AnswerTo({{1, 0}}, {1});
    lane.Observe(policy, answer.Seen());

    const std::vector<float> score = lane.Scores(policy);

    EXPECT_TRUE(std::isfinite(score[0])) << text;
    EXPECT_GT(score[0], score[1]) << text;
    EXPECT_THAT(score, AllOf(SizeIs(2), Each(Ge(0)))) << text;
  }
}

}  // namespace
}  // namespace ebbtide::service
