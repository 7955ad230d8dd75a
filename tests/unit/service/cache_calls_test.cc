// SPDX-License-Identifier: Apache-2.0
//
// One call on one layer, from Begin to Finish: where it may start, what the fixed point does, and
// what is refused with nothing changed.

#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "service/reason.h"
#include "tests/support/death_test.h"
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
constexpr CallDigest kDigest = {.low = 1, .high = 2};

class CacheCallsTest : public testing::Test {
 protected:
  CacheCallsTest() : sequence_(stand_.Open("a", 48, 32)) {}

  Cache& cache() { return stand_.cache(); }
  absl::StatusOr<Ticket> Begin(const BeginArgs& args) {
    return cache().Begin(sequence_, args, &lengths_);
  }
  // As Begin, which must refuse it.
  std::string ReasonOfBegin(const BeginArgs& args, absl::StatusCode code) {
    const absl::Status status = Begin(args).status();
    EXPECT_EQ(status.code(), code) << status;
    return ReasonOf(status);
  }
  void Run(uint32_t layer, uint64_t first, int32_t tokens, const CallDigest& digest = kDigest) {
    const Ticket ticket = stand_.Begin("a", layer, first, tokens);
    stand_.Place(ticket);
    cache().Finish(ticket, digest, 0, &lengths_);
  }
  // Places the ticket's tokens where the lower tiers have room for `records`.
  absl::Status TryPlace(const Ticket& ticket, uint64_t records = 1 << 20,
                        std::span<const int64_t> positions = {}) {
    const std::vector<std::vector<int32_t>> nobody(2);
    std::vector<std::vector<int32_t>> slots;
    stand_.SetRoom([=](auto sizes) { return test::RoomFor(records, sizes); });
    return cache().Place(ticket, {.victims = nobody, .positions = positions}, &slots).status();
  }
  std::vector<int32_t> Resident(int layer, int head) const {
    std::vector<int32_t> resident;
    const Lane& lane = sequence_->facts.lane(layer, head);
    for (int32_t index = 0; index < lane.length(); ++index) {
      if (lane.is_resident(index)) resident.push_back(index);
    }
    return resident;
  }

  CacheStand stand_;
  SequenceRef sequence_;
  Lengths lengths_;
};

// --- withdraw

TEST_F(CacheCallsTest, WithdrawnTokensLeaveTheRetriesOfOtherLayersAsTheyWere) {
  Run(0, 0, 20);
  Run(1, 0, 20);
  ASSERT_OK_AND_ASSIGN(const Ticket next,
                       Begin({.layer = 0, .first_index = 20, .tokens = 4, .digest = {5, 6}}));
  ASSERT_OK(TryPlace(next));
  cache().Withdraw(next);

  for (const uint32_t layer : {0U, 1U}) {
    ASSERT_OK_AND_ASSIGN(
        const Ticket again,
        Begin({.layer = layer, .first_index = 0, .tokens = 20, .digest = kDigest}));
    EXPECT_TRUE(again.replayed);
    cache().Abandon(again);
  }
}

// --- begin

TEST_F(CacheCallsTest, TicketSaysWhereLayerAndSequenceStand) {
  Run(0, 0, 20);
  Run(1, 0, 20);
  Run(0, 20, 3);

  ASSERT_OK_AND_ASSIGN(const Ticket ticket, Begin({.layer = 1, .first_index = 20, .tokens = 3}));

  EXPECT_EQ(ticket.sequence, sequence_);
  EXPECT_EQ(ticket.layer, 1);
  EXPECT_EQ(ticket.first_index, 20);
  EXPECT_EQ(ticket.tokens, 3);
  EXPECT_FALSE(ticket.replayed);
  EXPECT_EQ(ticket.length, 20);
  EXPECT_EQ(ticket.committed, 20);
  EXPECT_EQ(ticket.candidate_end, kPage);  // Complete blocks only.
  EXPECT_EQ(lengths_.length, 20U);
  EXPECT_EQ(lengths_.committed, 20U);
}

TEST_F(CacheCallsTest, LayerIsOneOfTheModels) {
  EXPECT_EQ(ReasonOfBegin({.layer = 2, .tokens = 1}, absl::StatusCode::kInvalidArgument),
            "LAYER_OUT_OF_RANGE");
}

// Its items were checked against the model of the one that was found.
TEST_F(CacheCallsTest, SequenceThatTookTheNameSinceIsNotCalled) {
  ASSERT_OK(cache().Close("a", "CLOSED").status());
  stand_.Open("a");

  EXPECT_EQ(ReasonOfBegin({.layer = 0, .tokens = 1}, absl::StatusCode::kNotFound),
            "SEQUENCE_UNKNOWN");
}

TEST_F(CacheCallsTest, LayerTakesOneCallAtATime) {
  ASSERT_OK_AND_ASSIGN(const Ticket ticket, Begin({.layer = 0, .tokens = 1}));

  EXPECT_EQ(ReasonOfBegin({.layer = 0, .tokens = 1}, absl::StatusCode::kUnavailable),
            "CALL_IN_FLIGHT");
  EXPECT_OK(Begin({.layer = 1, .tokens = 1}).status());  // The other layer is free.
  cache().Abandon(ticket);

  EXPECT_OK(Begin({.layer = 0, .tokens = 1}).status());
}

TEST_F(CacheCallsTest, CallStartsAtTheLayersEnd) {
  Run(0, 0, 20);
  Run(1, 0, 20);

  EXPECT_EQ(ReasonOfBegin({.layer = 0, .first_index = 21, .tokens = 1}, absl::StatusCode::kAborted),
            "INDEX_GAP");
  EXPECT_EQ(ReasonOfBegin({.layer = 0, .first_index = 19, .tokens = 2}, absl::StatusCode::kAborted),
            "INDEX_CONFLICT");
  EXPECT_EQ(lengths_.length, 20U);
  EXPECT_EQ(lengths_.committed, 20U);
  EXPECT_OK(Begin({.layer = 0, .first_index = 20, .tokens = 1}).status());
}

TEST_F(CacheCallsTest, LayerMayNotRunAheadOfTheOthers) {
  Run(0, 0, 5);

  EXPECT_EQ(ReasonOfBegin({.layer = 0, .first_index = 5, .tokens = 1}, absl::StatusCode::kAborted),
            "INDEX_GAP");
  EXPECT_EQ(lengths_.length, 5U);
  EXPECT_EQ(lengths_.committed, 0U);
}

TEST_F(CacheCallsTest, LastCallAgainIsReplayed) {
  Run(0, 0, 5);

  ASSERT_OK_AND_ASSIGN(
      const Ticket ticket,
      Begin({.layer = 0, .first_index = 0, .queries = 5, .tokens = 5, .digest = kDigest}));

  EXPECT_TRUE(ticket.replayed);
  EXPECT_EQ(ticket.tokens, 0);  // Nothing is appended again.
  EXPECT_FALSE(cache().Finish(ticket, kDigest, 0, &lengths_));
  EXPECT_EQ(lengths_.length, 5U);
}

TEST_F(CacheCallsTest, OtherTokensAtTheSamePlaceAreNoReplay) {
  Run(0, 0, 5);
  const CallDigest other = {.low = 1, .high = 3};

  EXPECT_EQ(ReasonOfBegin({.layer = 0, .first_index = 0, .tokens = 5, .digest = other},
                          absl::StatusCode::kAborted),
            "INDEX_CONFLICT");
  EXPECT_EQ(ReasonOfBegin({.layer = 0, .first_index = 0, .tokens = 4, .digest = kDigest},
                          absl::StatusCode::kAborted),
            "INDEX_CONFLICT");
}

TEST_F(CacheCallsTest, OnlyTheLastCallIsReplayed) {
  Run(0, 0, 5);
  Run(1, 0, 5);
  Run(0, 5, 1);

  EXPECT_EQ(ReasonOfBegin({.layer = 0, .first_index = 0, .tokens = 5, .digest = kDigest},
                          absl::StatusCode::kAborted),
            "INDEX_CONFLICT");
}

TEST_F(CacheCallsTest, TruncatedCallIsNotReplayed) {
  Run(0, 0, 5);
  ASSERT_OK(cache().Truncate("a", 0).status());

  ASSERT_OK_AND_ASSIGN(const Ticket ticket,
                       Begin({.layer = 0, .first_index = 0, .tokens = 5, .digest = kDigest}));

  EXPECT_FALSE(ticket.replayed);
}

TEST_F(CacheCallsTest, QueriesAloneAskAboutTokensThatTheLayerHolds) {
  Run(0, 0, 5);

  ASSERT_OK_AND_ASSIGN(const Ticket ticket, Begin({.layer = 0, .first_index = 2, .queries = 3}));
  EXPECT_EQ(ticket.tokens, 0);
  cache().Abandon(ticket);
  EXPECT_EQ(ReasonOfBegin({.layer = 0, .first_index = 3, .queries = 3}, absl::StatusCode::kAborted),
            "INDEX_GAP");
  EXPECT_EQ(ReasonOfBegin({.layer = 1, .first_index = 0, .queries = 1}, absl::StatusCode::kAborted),
            "INDEX_GAP");
}

// --- the fixed point

TEST_F(CacheCallsTest, TokensTakeSlotsInEveryLaneOfTheLayer) {
  const Ticket ticket = stand_.Begin("a", 1, 0, 3);

  stand_.Place(ticket);

  EXPECT_THAT(Resident(1, 0), ElementsAre(0, 1, 2));
  EXPECT_THAT(Resident(1, 1), ElementsAre(0, 1, 2));
  EXPECT_THAT(Resident(0, 0), IsEmpty());
  EXPECT_EQ(cache().Counters().tokens_appended, 3U * 2);
}

TEST_F(CacheCallsTest, VictimsAreAbsentFromTheFixedPointOn) {
  stand_.Append("a", 0, kPage + 2);
  const Ticket ticket = stand_.Begin("a", 0, kPage + 2, 1);

  stand_.Place(ticket, {0, 7});

  const std::vector<int32_t> resident = Resident(0, 1);
  EXPECT_EQ(resident.size(), static_cast<size_t>(kPage + 2 + 1 - 2));
  EXPECT_EQ(cache().Counters().tokens_demoted, 2U * 2);
  // Unconfirmed: their bytes are in their slots still.
  EXPECT_EQ(sequence_->facts.lane(0, 1).slot_of(7), 7);
  EXPECT_EQ(sequence_->facts.lane(0, 1).slot_of(kPage + 2), kPage + 2);
}

TEST_F(CacheCallsTest, SlotsOfVictimsOldEnoughGoToTheNewTokens) {
  stand_.Append("a", 0, 3 * kPage);
  stand_.Carry();
  const Ticket ticket = stand_.Begin("a", 0, 3 * kPage, 2);

  stand_.Place(ticket, {7, 3, kPage});

  EXPECT_EQ(sequence_->facts.lane(0, 0).slot_of(3 * kPage), 3);
  EXPECT_EQ(sequence_->facts.lane(0, 0).slot_of(3 * kPage + 1), 7);
  EXPECT_EQ(sequence_->facts.lane(0, 0).slot_of(7), kNoSlot);
  EXPECT_EQ(sequence_->facts.lane(0, 0).slot_of(kPage), kPage);
}

TEST_F(CacheCallsTest, WhenBlocksAreConfirmedDecidesNoSlot) {
  stand_.Append("a", 0, 40);
  stand_.Carry();  // Two blocks; the other sequence's are not sealed when its tokens leave.
  const SequenceRef late = stand_.Open("late", 48, 32);
  stand_.Append("late", 0, 40);

  stand_.Append("a", 40, 4, {3, 20});
  stand_.Append("late", 40, 4, {3, 20});

  for (int32_t index = 0; index < 44; ++index) {
    EXPECT_EQ(sequence_->facts.lane(0, 0).slot_of(index), late->facts.lane(0, 0).slot_of(index));
  }
}

// Lanes with slots for budget, chunk and a page: 96, all taken, 16 of them by tokens that left.
class CacheSlotsTest : public CacheCallsTest {
 protected:
  CacheSlotsTest() {
    stand_.Append("a", 0, 32);
    stand_.Append("a", 32, 32);
    stand_.Append("a", 64, 32, Range(32, 48));  // Young: their slots linger.
    victims_of_lanes_.assign(2, victims_);
  }

  static std::vector<int32_t> Range(int32_t first, int32_t end) {
    std::vector<int32_t> range;
    for (int32_t index = first; index < end; ++index) range.push_back(index);
    return range;
  }

  const std::vector<int32_t> victims_ = Range(0, 32);
  std::vector<std::vector<int32_t>> victims_of_lanes_;
};

TEST_F(CacheSlotsTest, CallWithoutSlotsIsRefusedAtItsDeadlineWithNothingChanged) {
  const std::vector<int32_t> resident = Resident(0, 0);
  const uint64_t demoted = cache().Counters().tokens_demoted;
  const Ticket ticket = stand_.Begin("a", 0, 96, 32);

  const absl::Status status =
      cache().AwaitSlots(ticket, victims_of_lanes_, stand_.clock().SinceStart());

  EXPECT_THAT(status, test::StatusIs(absl::StatusCode::kResourceExhausted,
                                     AllOf(HasSubstr("\"a\""), HasSubstr("32 tokens"))));
  EXPECT_EQ(ReasonOf(status), "DEVICE_FULL");
  EXPECT_EQ(Resident(0, 0), resident);
  EXPECT_EQ(cache().Counters().tokens_demoted, demoted);
  cache().Abandon(ticket);
  cache().CheckInvariants();
}

TEST_F(CacheSlotsTest, SealsFreeTheSlotsThatACallWaitsFor) {
  const Ticket ticket = stand_.Begin("a", 0, 96, 32);
  std::thread carrier([this] { stand_.Carry(); });

  EXPECT_OK(
      cache().AwaitSlots(ticket, victims_of_lanes_, stand_.clock().SinceStart() + absl::Hours(1)));

  carrier.join();
  stand_.Place(ticket, victims_);
  stand_.Finish(ticket);
  EXPECT_EQ(Resident(0, 0), Range(48, 128));
}

TEST_F(CacheSlotsTest, EachBlockWhoseSlotsAreDueMustBeConfirmed) {
  const Ticket ticket = stand_.Begin("a", 0, 96, 1);
  const auto is_refused = [&] {
    return ReasonOf(cache().AwaitSlots(ticket, victims_of_lanes_, stand_.clock().SinceStart())) ==
           "DEVICE_FULL";
  };
  for (int32_t block = 0; block < 3; ++block) {  // Those of the tokens that left or leave now.
    EXPECT_TRUE(is_refused()) << block;
    const CarryPlan plan = *cache().PlanSeal();
    ASSERT_EQ(plan.block, block);
    cache().CommitSeal(plan, TierName::kHost);
  }

  EXPECT_FALSE(is_refused());
}

TEST_F(CacheCallsTest, FirstLayersCallReservesForTheOthers) {
  const uint64_t at_open = cache().metadata_bytes();
  const Ticket first = stand_.Begin("a", 0, 0, kPage + 1);
  const Cache::Need need = cache().NeedOf(first);
  EXPECT_EQ(need.blocks, 2);
  stand_.Place(first);
  stand_.Finish(first);
  EXPECT_EQ(cache().metadata_bytes(), at_open + need.metadata_bytes);

  const Ticket second = stand_.Begin("a", 1, 0, kPage + 1);

  EXPECT_EQ(cache().NeedOf(second).blocks, 0);
  EXPECT_EQ(cache().NeedOf(second).metadata_bytes, 0U);
  EXPECT_OK(TryPlace(second, 0));
}

TEST_F(CacheCallsTest, TokensOfABegunBlockNeedNothingMore) {
  stand_.Append("a", 0, 3);

  EXPECT_EQ(cache().NeedOf(stand_.Begin("a", 0, 3, kPage - 3)).blocks, 0);
  EXPECT_EQ(cache().NeedOf(stand_.Begin("a", 1, 3, kPage - 2)).blocks, 1);
}

TEST_F(CacheCallsTest, FullLowerTiersRefuseTheFirstLayerWithNothingChanged) {
  const uint64_t at_open = cache().metadata_bytes();
  const Ticket ticket = stand_.Begin("a", 0, 0, kPage + 1);

  const absl::Status status = TryPlace(ticket, 1);

  EXPECT_THAT(status, test::StatusIs(absl::StatusCode::kResourceExhausted,
                                     AllOf(HasSubstr("\"a\": 2 more blocks of "),
                                           HasSubstr(" B need a place below"))));
  EXPECT_EQ(ReasonOf(status), "LOWER_TIERS_FULL");
  EXPECT_EQ(cache().metadata_bytes(), at_open);
  EXPECT_THAT(Resident(0, 0), IsEmpty());
  cache().Abandon(ticket);
  EXPECT_OK(TryPlace(stand_.Begin("a", 0, 0, kPage), 1));
}

TEST_F(CacheCallsTest, ABlockThatFindsNoRoomNeedsIt) {
  EXPECT_THAT(TryPlace(stand_.Begin("a", 0, 0, kPage), 0),
              test::StatusIs(absl::StatusCode::kResourceExhausted,
                             AllOf(HasSubstr("\"a\": 1 more block of "),
                                   HasSubstr(" B needs a place below"))));
}

TEST_F(CacheCallsTest, PositionsAreThoseOfTheFirstLayer) {
  const std::vector<int64_t> positions = {100, 7, 7};
  const Ticket first = stand_.Begin("a", 0, 0, 3);
  ASSERT_OK(TryPlace(first, 1, positions));
  stand_.Finish(first);

  Run(1, 0, 3);
  Run(0, 3, 1);

  EXPECT_THAT(cache().Positions(first), ElementsAre(100, 7, 7, 3));
}

// Another count would be reserved by nobody, and take the positions of other tokens.
TEST_F(CacheCallsTest, LayersBringTheSameTokensOfAStep) {
  Run(0, 0, 4);
  for (const int32_t tokens : {3, 5}) {
    const Ticket ticket = stand_.Begin("a", 1, 0, tokens);

    const absl::Status status = TryPlace(ticket);

    EXPECT_THAT(status, test::StatusIs(absl::StatusCode::kAborted,
                                       AllOf(HasSubstr("layer 1"), HasSubstr("up to 4"))));
    EXPECT_EQ(ReasonOf(status), "INDEX_CONFLICT");
    EXPECT_EQ(cache().Positions(ticket).size(), 4U);
    EXPECT_THAT(Resident(1, 0), IsEmpty());
    cache().Abandon(ticket);
  }
  Run(1, 0, 4);
  cache().CheckInvariants();
}

TEST_F(CacheCallsTest, LayersThatComeTogetherBringTheSameTokens) {
  const Ticket first = stand_.Begin("a", 0, 0, 4);
  const Ticket second = stand_.Begin("a", 1, 0, 5);
  stand_.Place(second);

  EXPECT_EQ(ReasonOf(TryPlace(first)), "INDEX_CONFLICT");
}

TEST_F(CacheCallsTest, StepHalfDoneMayBeTruncatedAndBroughtOtherwise) {
  Run(0, 0, 4);

  ASSERT_OK(cache().Truncate("a", 0).status());

  Run(1, 0, 5);
  Run(0, 0, 5);
  EXPECT_EQ(lengths_.committed, 5U);
}

// --- finish

TEST_F(CacheCallsTest, LastLayerOfAStepCommitsIt) {
  Run(0, 0, kPage);
  EXPECT_EQ(lengths_.length, static_cast<uint64_t>(kPage));
  EXPECT_EQ(lengths_.committed, 0U);
  const Ticket ticket = stand_.Begin("a", 1, 0, kPage);
  stand_.Place(ticket);

  EXPECT_TRUE(cache().Finish(ticket, kDigest, 0, &lengths_));  // A block became complete.

  EXPECT_EQ(lengths_.committed, static_cast<uint64_t>(kPage));
  EXPECT_TRUE(cache().HasUnsealed());
}

TEST_F(CacheCallsTest, ObservedEndOnlyRises) {
  Run(0, 0, 5);
  Run(1, 0, 5);
  Ticket ticket = *Begin({.layer = 0, .first_index = 0, .queries = 5});
  cache().Finish(ticket, {}, 5, &lengths_);
  ticket = *Begin({.layer = 0, .first_index = 0, .queries = 2});
  EXPECT_EQ(ticket.observed_end, 5);

  cache().Finish(ticket, {}, 2, &lengths_);

  EXPECT_EQ(Begin({.layer = 0, .first_index = 0, .queries = 1})->observed_end, 5);
  EXPECT_EQ(Begin({.layer = 1, .first_index = 0, .queries = 1})->observed_end, 0);
}

TEST_F(CacheCallsTest, QueriesAloneDoNotForgetTheLastCall) {
  Run(0, 0, 5);
  const Ticket asking = *Begin({.layer = 0, .first_index = 0, .queries = 5});
  cache().Finish(asking, {}, 5, &lengths_);

  EXPECT_TRUE(Begin({.layer = 0, .first_index = 0, .tokens = 5, .digest = kDigest})->replayed);
}

// --- truncate

TEST_F(CacheCallsTest, TruncateCutsEveryLayerAndItsMemory) {
  stand_.Append("a", 0, kPage + 4);
  Run(0, kPage + 4, kPage);  // The first layer alone has completed page 1.
  for (size_t lane = 0; lane < sequence_->memory.size(); ++lane) {
    LaneMemory& memory = sequence_->memory[lane];
    const size_t length = lane < 2 ? 2 * kPage + 4 : kPage + 4;
    memory.score.resize(length);
    memory.mass.resize(length);
    memory.digests.resize(length / kPage);
  }

  ASSERT_OK(cache().Truncate("a", kPage + 1).status());

  EXPECT_EQ(sequence_->facts.committed, kPage + 1);
  EXPECT_EQ(cache().Counters().tokens_forgotten.at("TRUNCATED"), 2U * (kPage + 3) + 2U * 3);
  for (const LaneMemory& memory : sequence_->memory) {
    EXPECT_EQ(memory.score.size(), kPage + 1U);
    EXPECT_EQ(memory.mass.size(), kPage + 1U);
    EXPECT_EQ(memory.digested_pages(), 1);
  }
  cache().CheckInvariants();
}

TEST_F(CacheCallsTest, TruncateWithinBoundsOnly) {
  stand_.Append("a", 0, kPage + 3);
  const auto refused = [&](uint64_t length, absl::StatusCode code) {
    const absl::Status status = cache().Truncate("a", length).status();
    EXPECT_EQ(status.code(), code) << status;
    return ReasonOf(status);
  };

  EXPECT_EQ(refused(kPage + 4, absl::StatusCode::kInvalidArgument), "LENGTH_BEYOND_END");
  EXPECT_EQ(refused(~uint64_t{0}, absl::StatusCode::kInvalidArgument), "LENGTH_BEYOND_END");
  EXPECT_EQ(refused(kPage - 1, absl::StatusCode::kFailedPrecondition), "SEALED");
  EXPECT_EQ(ReasonOf(cache().Truncate("b", 0).status()), "SEQUENCE_UNKNOWN");
  const Ticket ticket = stand_.Begin("a", 0, kPage + 3, 1);
  EXPECT_EQ(refused(kPage, absl::StatusCode::kUnavailable), "CALL_IN_FLIGHT");
  cache().Abandon(ticket);
  EXPECT_EQ(sequence_->facts.committed, kPage + 3);
  EXPECT_OK(cache().Truncate("a", kPage + 3).status());
  EXPECT_EQ(cache().Counters().tokens_forgotten.count("TRUNCATED"), 0U);
}

using CacheDeathTest = test::ThreadsafeDeathTest;

TEST_F(CacheDeathTest, WithdrawalOfACallThatPlacedNothingStopsTheProcess) {
  CacheStand stand;
  stand.Open("a", 48, 32);
  const Ticket ticket = stand.Begin("a", 0, 0, 0);

  EXPECT_DEATH(stand.cache().Withdraw(ticket), "placed nothing");
}

TEST_F(CacheDeathTest, TokensPlacedWithoutSlotsStopTheProcess) {
  CacheStand stand;
  stand.Open("a", 48, 32);
  for (uint64_t first = 0; first < 64; first += 32) stand.Append("a", first, 32);
  const Ticket ticket = stand.Begin("a", 0, 64, 2);
  const std::vector<std::vector<int32_t>> victims(2, std::vector<int32_t>{0, 1});
  std::vector<std::vector<int32_t>> slots;

  EXPECT_DEATH((void)stand.cache().Place(ticket, {.victims = victims, .positions = {}}, &slots),
               "slots are awaited");
}

}  // namespace
}  // namespace ebbtide::service
