// SPDX-License-Identifier: Apache-2.0
//
// What the cache says of models and sequences as they come and go.

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "base/status_macros.h"
#include "service/cache.h"
#include "service/reason.h"
#include "tests/support/engine_stand.h"
#include "tests/support/fake_clock.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/service/cache_stand.h"

namespace ebbtide::service {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

constexpr int32_t kPage = 16;
constexpr uint64_t kRoom = 8;  // Blocks that the lower tiers have room for.

class CacheOpenTest : public testing::Test {
 protected:
  CacheOpenTest()
      : pool_(4 << 20),
        cache_({.device_budget_bytes = pool_.size(),
                .default_recall = "estimated(0.05)",
                .idle_timeout = absl::Minutes(10),
                .look_at_room = [](auto sizes) { return test::RoomFor(kRoom, sizes); }},
               clock_) {
    EXPECT_OK(cache_.RegisterModel("m", test::SmallGeometry(), "w").status());
  }

  static OpenArgs Args(const std::string& name = "a") {
    return {.sequence = name,
            .model = "m",
            .policy = "streaming",
            .budget_tokens = 64,
            .chunk_tokens = 32};
  }
  absl::StatusOr<uint64_t> MetadataToOpen(const OpenArgs& args) {
    EBBTIDE_ASSIGN_OR_RETURN(const Cache::OpenNeed need, cache_.NeedToOpen(args));
    return need.metadata_bytes;
  }
  absl::StatusOr<OpenAnswer> Open(const OpenArgs& args) {
    EBBTIDE_ASSIGN_OR_RETURN(const uint64_t bytes, MetadataToOpen(args));
    EBBTIDE_ASSIGN_OR_RETURN(const Cache::Opened opened,
                             cache_.Open(args, {.pool = pool_.data(), .charged_bytes = bytes}));
    EXPECT_EQ(opened.metadata_bytes, bytes);
    return opened.answer;
  }

  void ExpectRefused(const absl::Status& status, absl::StatusCode code, const std::string& reason,
                     const std::string& words) {
    EXPECT_THAT(status, test::StatusIs(code, HasSubstr(words)));
    EXPECT_EQ(ReasonOf(status), reason);
  }

  // All layers hold `tokens` more; nothing lies in their slots.
  void Append(const std::string& name, uint64_t first, int32_t tokens) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      Lengths lengths;
      const auto ticket = cache_.Begin(
          *cache_.Find(name), {.layer = layer, .first_index = first, .tokens = tokens}, &lengths);
      ASSERT_OK(ticket.status());
      const std::vector<std::vector<int32_t>> nobody(2);
      std::vector<std::vector<int32_t>> slots;
      ASSERT_OK(cache_.Place(*ticket, {.victims = nobody, .positions = {}}, &slots).status());
      cache_.Finish(*ticket, {}, 0, &lengths);
    }
  }

  test::FakeClock clock_;
  std::vector<std::byte> pool_;
  Cache cache_;
};

// --- models

TEST_F(CacheOpenTest, ModelMayBeRegisteredAgainAsItIs) {
  EXPECT_THAT(cache_.RegisterModel("m", test::SmallGeometry(), "w"),
              test::IsOkAndHolds(test::SmallGeometry()));
}

TEST_F(CacheOpenTest, ModelOfAnotherShapeOrWeightsNeedsAnotherName) {
  Geometry other = test::SmallGeometry();
  other.scale = 0.5F;

  ExpectRefused(cache_.RegisterModel("m", other, "w").status(),
                absl::StatusCode::kFailedPrecondition, "GEOMETRY_DIFFERS", "\"m\"");
  ExpectRefused(cache_.RegisterModel("m", test::SmallGeometry(), "v").status(),
                absl::StatusCode::kFailedPrecondition, "GEOMETRY_DIFFERS", "another name");
  EXPECT_OK(cache_.RegisterModel("n", other, "v").status());
}

TEST_F(CacheOpenTest, GeometryOutOfRangeIsRefusedAndTakesNoName) {
  Geometry wrong = test::SmallGeometry();
  wrong.head_dim = 300;

  ExpectRefused(cache_.RegisterModel("n", wrong, "w").status(), absl::StatusCode::kInvalidArgument,
                "GEOMETRY_INVALID", "head_dim is 300");
  EXPECT_OK(cache_.RegisterModel("n", test::SmallGeometry(), "w").status());
}

TEST_F(CacheOpenTest, NamesOfModelsAreLimited) {
  for (int i = 1; i < 1024; ++i) {
    ASSERT_OK(cache_.RegisterModel("m" + std::to_string(i), test::SmallGeometry(), "w").status());
  }

  ExpectRefused(cache_.RegisterModel("one more", test::SmallGeometry(), "w").status(),
                absl::StatusCode::kResourceExhausted, "TOO_MANY_MODELS", "1024");
  EXPECT_OK(cache_.RegisterModel("m", test::SmallGeometry(), "w").status());
}

// --- open

TEST_F(CacheOpenTest, WhatASequenceKeepsInHostMemoryIsCharged) {
  OpenArgs args = Args();
  ASSERT_OK_AND_ASSIGN(const uint64_t plain, MetadataToOpen(args));
  // Itself, and in each of four lanes three numbers for each of 64 + 32 + kPage slots.
  const size_t lanes = 4 * (sizeof(Lane) + sizeof(LaneMemory) + (64 + 32 + kPage) * 3 * 4);
  EXPECT_GE(plain, sizeof(OpenedSequence) + lanes);
  EXPECT_LE(plain, sizeof(OpenedSequence) + lanes + 1024);
  args.sequence = std::string(100, 'a');  // Kept as its name and as what was asked for.
  EXPECT_THAT(MetadataToOpen(args), test::IsOkAndHolds(plain + 2 * 99));
  args = Args();
  args.policy = "snapkv(window=24)";
  ASSERT_OK_AND_ASSIGN(const uint64_t windowed, MetadataToOpen(args));
  const Geometry geometry = test::SmallGeometry();
  const auto query_bytes = static_cast<uint64_t>(geometry.group() * geometry.head_dim) * 4;
  const size_t longer = args.policy.size() - Args().policy.size();
  EXPECT_EQ(windowed, plain + longer + 4 * 24 * (query_bytes + 4));

  ASSERT_OK(Open(args).status());

  EXPECT_EQ(cache_.metadata_bytes(), windowed);
  EXPECT_THAT(MetadataToOpen(args), test::IsOkAndHolds(0U));  // It is open.
  cache_.CheckInvariants();
}

TEST_F(CacheOpenTest, SequenceWhoseHostMemoryIsNotChargedIsNotOpened) {
  ASSERT_OK_AND_ASSIGN(const uint64_t bytes, MetadataToOpen(Args()));

  ExpectRefused(cache_.Open(Args(), {.pool = pool_.data(), .charged_bytes = bytes - 1}).status(),
                absl::StatusCode::kUnavailable, "CALL_IN_FLIGHT", "\"a\"");

  EXPECT_EQ(cache_.metadata_bytes(), 0U);
  EXPECT_EQ(cache_.DeviceReport().used_bytes, 0U);
}

TEST_F(CacheOpenTest, AnswerSaysWhatWasResolved) {
  ASSERT_OK_AND_ASSIGN(const OpenAnswer answer, Open(Args()));

  EXPECT_EQ(answer.policy, "streaming(sinks=4,recent=16)");
  EXPECT_EQ(answer.why, "as asked");
  EXPECT_EQ(answer.prefill, "exact");
  EXPECT_EQ(answer.recall, "estimated(0.05)");  // The daemon's default.
  EXPECT_EQ(answer.budget_tokens, 64U);
  EXPECT_EQ(answer.protected_tokens, 4U + kPage);
  EXPECT_EQ(answer.chunk_tokens, 32U);
  EXPECT_EQ(answer.length, 0U);
  EXPECT_EQ(answer.idle_timeout, absl::Minutes(10));
  // Budget, chunk and one page for tokens that wait for their seal, in each of four lanes.
  EXPECT_EQ(answer.device_bytes,
            4U * (64 + 32 + kPage) / kPage * test::SmallGeometry().page_shape().page_bytes());
  EXPECT_EQ(cache_.DeviceReport().used_bytes, answer.device_bytes);
}

TEST_F(CacheOpenTest, WhatIsNotAskedForHasADefault) {
  OpenArgs args = Args();
  args.policy = "";
  args.chunk_tokens = 0;
  args.recall = "off";
  args.idle_timeout = absl::Seconds(5);

  ASSERT_OK_AND_ASSIGN(const OpenAnswer answer, Open(args));

  EXPECT_THAT(answer.policy, HasSubstr("snapkv"));
  EXPECT_THAT(answer.why, HasSubstr("auto"));
  EXPECT_EQ(answer.chunk_tokens, static_cast<uint32_t>(kChunkTokensMax));
  EXPECT_EQ(answer.recall, "off");
  EXPECT_EQ(answer.idle_timeout, absl::Seconds(5));
}

TEST_F(CacheOpenTest, EqualOpenIsTheSameSequence) {
  ASSERT_OK_AND_ASSIGN(const OpenAnswer first, Open(Args()));
  Append("a", 0, 5);

  ASSERT_OK_AND_ASSIGN(const OpenAnswer again, Open(Args()));

  EXPECT_EQ(again.length, 5U);
  EXPECT_EQ(again.policy, first.policy);
  EXPECT_EQ(cache_.DeviceReport().used_bytes, first.device_bytes);
  EXPECT_EQ(cache_.Counters().sequences, 1U);
}

TEST_F(CacheOpenTest, OpenNameWithOtherArgumentsIsRefused) {
  ASSERT_OK(Open(Args()).status());
  OpenArgs other = Args();
  other.budget_tokens = 65;

  ExpectRefused(Open(other).status(), absl::StatusCode::kFailedPrecondition, "SEQUENCE_DIFFERS",
                "\"a\"");
}

TEST_F(CacheOpenTest, WhatCannotBeOpenedIsRefusedByItsReason) {
  OpenArgs args = Args();
  args.model = "n";
  ExpectRefused(Open(args).status(), absl::StatusCode::kNotFound, "MODEL_UNKNOWN", "\"n\"");

  args = Args();
  args.budget_tokens = kSequenceTokensMax + 1;
  ExpectRefused(Open(args).status(), absl::StatusCode::kInvalidArgument, "BUDGET_TOO_LARGE",
                "16777217 tokens (at most 16777216)");
  args.budget_tokens = 0xFFFFFFFF;
  ExpectRefused(Open(args).status(), absl::StatusCode::kInvalidArgument, "BUDGET_TOO_LARGE", "");

  args = Args();
  args.chunk_tokens = kChunkTokensMax + 1;
  ExpectRefused(Open(args).status(), absl::StatusCode::kInvalidArgument, "BUDGET_TOO_LARGE",
                "chunks of 513 (at most 512)");

  args = Args();
  args.budget_tokens = 20;
  ExpectRefused(Open(args).status(), absl::StatusCode::kInvalidArgument, "BUDGET_TOO_SMALL", "20");

  args = Args();
  args.policy = "best";
  ExpectRefused(Open(args).status(), absl::StatusCode::kInvalidArgument, "POLICY_INVALID", "best");

  args = Args();
  args.prefill = "lazy";
  ExpectRefused(Open(args).status(), absl::StatusCode::kInvalidArgument, "PREFILL_INVALID", "lazy");

  args = Args();
  args.recall = "soft";
  ExpectRefused(Open(args).status(), absl::StatusCode::kInvalidArgument, "RECALL_INVALID", "soft");

  EXPECT_EQ(cache_.Counters().sequences, 0U);
  EXPECT_EQ(cache_.DeviceReport().used_bytes, 0U);
}

TEST_F(CacheOpenTest, FullPoolRefusesANewSequenceAndSaysWhatIsFree) {
  OpenArgs large = Args("b");
  large.budget_tokens = 10000;
  ASSERT_OK(Open(Args()).status());
  const uint64_t used_bytes = cache_.DeviceReport().used_bytes;

  const absl::Status status = Open(large).status();

  EXPECT_THAT(status, test::StatusIs(absl::StatusCode::kResourceExhausted,
                                     AllOf(HasSubstr("\"b\""), HasSubstr("held by 1 sequences"),
                                           HasSubstr(std::to_string(pool_.size() - used_bytes) +
                                                     " of " + std::to_string(pool_.size())))));
  EXPECT_EQ(ReasonOf(status), "DEVICE_FULL");
  EXPECT_EQ(cache_.DeviceReport().used_bytes, used_bytes);
  EXPECT_EQ(cache_.Counters().sequences, 1U);
}

TEST_F(CacheOpenTest, WhatNoPoolOfThisSizeHoldsIsNotBlamedOnOthers) {
  OpenArgs large = Args("b");
  large.budget_tokens = 100000;

  const absl::Status status = Open(large).status();

  EXPECT_EQ(ReasonOf(status), "DEVICE_FULL");
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("in one run, and no sequence is open; raise device.budget, or ask "
                              "for a smaller budget or chunk_tokens"),
                    testing::Not(HasSubstr("held by"))));
}

TEST_F(CacheOpenTest, SequencesHaveFramesOfTheirOwn) {
  ASSERT_OK_AND_ASSIGN(const OpenAnswer answer, Open(Args("a")));
  ASSERT_OK(Open(Args("b")).status());

  const auto a = *cache_.Find("a");
  const auto b = *cache_.Find("b");

  EXPECT_EQ(a->memory[0].frames, pool_.data());
  EXPECT_EQ(b->memory[0].frames, pool_.data() + answer.device_bytes);
  for (size_t lane = 1; lane < a->memory.size(); ++lane) {
    EXPECT_EQ(a->memory[lane].frames - a->memory[lane - 1].frames,
              static_cast<ptrdiff_t>(answer.device_bytes / a->memory.size()));
  }
  EXPECT_NE(a->facts.number, b->facts.number);
}

// --- close

TEST_F(CacheOpenTest, CloseGivesBackWhatWasPromised) {
  for (const char* name : {"a", "b", "c"}) {
    ASSERT_OK(Open(Args(name)).status());
    Append(name, 0, kRoom * kPage - kPage);
    ASSERT_OK(cache_.Close(name, "CLOSED").status());
  }
  cache_.CheckInvariants();
}

TEST_F(CacheOpenTest, CloseForgetsTheSequenceAndCountsItsTokens) {
  ASSERT_OK(Open(Args()).status());
  Append("a", 0, 20);
  ASSERT_TRUE(cache_.HasUnsealed());

  const auto closed = cache_.Close("a", "IDLE");

  ASSERT_OK(closed.status());
  ASSERT_TRUE(closed->has_value());
  EXPECT_EQ((*closed)->blocks.size(), 1U);  // Of two the one that may have been written.
  cache_.CheckInvariants();
  EXPECT_EQ(cache_.metadata_bytes(), 0U);
  EXPECT_FALSE(cache_.HasUnsealed());
  EXPECT_EQ(cache_.Counters().tokens_forgotten.at("IDLE"), 20U * 4);
  ExpectRefused(cache_.Find("a").status(), absl::StatusCode::kNotFound, "SEQUENCE_UNKNOWN",
                "\"a\"");
  cache_.CheckInvariants();
}

TEST_F(CacheOpenTest, CloseNamesTheBlocksThatMayLieBelow) {
  ASSERT_OK(Open(Args()).status());
  Append("a", 0, 32);
  Append("a", 32, 32);
  const uint64_t number = (*cache_.Find("a"))->facts.number;
  for (int block = 0; block < 3; ++block) {
    cache_.CommitSeal(*cache_.PlanSeal(), block == 1 ? TierName::kRocksdb : TierName::kHost);
  }

  const auto closed = cache_.Close("a", "CLOSED");

  ASSERT_OK(closed.status());
  EXPECT_THAT((*closed)->blocks, ElementsAre(storage::BlockKey{.sequence = number, .block = 0},
                                             storage::BlockKey{.sequence = number, .block = 1},
                                             storage::BlockKey{.sequence = number, .block = 2},
                                             storage::BlockKey{.sequence = number, .block = 3}));
}

TEST_F(CacheOpenTest, CloseIsAnsweredAgainButNotForStrangers) {
  ASSERT_OK(Open(Args()).status());
  ASSERT_OK(cache_.Close("a", "CLOSED").status());

  const auto again = cache_.Close("a", "CLOSED");

  ASSERT_OK(again.status());
  EXPECT_FALSE(again->has_value());
  ExpectRefused(cache_.Close("b", "CLOSED").status(), absl::StatusCode::kNotFound,
                "SEQUENCE_UNKNOWN", "\"b\"");
}

TEST_F(CacheOpenTest, ClosedNameMayBeOpenedAndClosedAgain) {
  ASSERT_OK(Open(Args()).status());
  const uint64_t number = (*cache_.Find("a"))->facts.number;
  ASSERT_OK(cache_.Close("a", "CLOSED").status());

  ASSERT_OK_AND_ASSIGN(const OpenAnswer answer, Open(Args()));

  EXPECT_EQ(answer.length, 0U);
  EXPECT_NE((*cache_.Find("a"))->facts.number, number);  // Never reused within a boot.
  const auto closed = cache_.Close("a", "CLOSED");
  ASSERT_OK(closed.status());
  EXPECT_TRUE(closed->has_value());
}

TEST_F(CacheOpenTest, SequenceUnderACallIsNotClosed) {
  ASSERT_OK(Open(Args()).status());
  Lengths lengths;
  ASSERT_OK_AND_ASSIGN(const Ticket ticket,
                       cache_.Begin(*cache_.Find("a"), {.layer = 1, .tokens = 1}, &lengths));

  ExpectRefused(cache_.Close("a", "CLOSED").status(), absl::StatusCode::kUnavailable,
                "CALL_IN_FLIGHT", "\"a\"");
  cache_.Abandon(ticket);

  EXPECT_OK(cache_.Close("a", "CLOSED").status());
}

TEST_F(CacheOpenTest, FramesAreGivenBackByTheReaperAlone) {
  ASSERT_OK(Open(Args()).status());
  const SequenceRef sequence = *cache_.Find("a");
  EXPECT_FALSE(cache_.MayReap(sequence));  // It is open.
  ASSERT_OK(cache_.Close("a", "CLOSED").status());
  EXPECT_GT(cache_.DeviceReport().used_bytes, 0U);

  EXPECT_TRUE(cache_.MayReap(sequence));
  EXPECT_FALSE(cache_.MayReap(sequence));  // One caller alone goes on.
  cache_.Reap(sequence);

  EXPECT_EQ(cache_.DeviceReport().used_bytes, 0U);
}

TEST_F(CacheOpenTest, FramesThatACarrierReadsAreNotReaped) {
  ASSERT_OK(Open(Args()).status());
  const SequenceRef sequence = *cache_.Find("a");
  Append("a", 0, kPage);
  const auto plan = cache_.PlanSeal();
  ASSERT_OK(cache_.Close("a", "CLOSED").status());
  EXPECT_FALSE(cache_.MayReap(sequence));

  cache_.CommitSeal(*plan, TierName::kHost);

  EXPECT_TRUE(cache_.MayReap(sequence));
}

TEST_F(CacheOpenTest, SequenceHasItsOwnIdleTimeout) {
  OpenArgs hasty = Args("hasty");
  hasty.idle_timeout = absl::Seconds(5);
  ASSERT_OK(Open(Args("a")).status());
  ASSERT_OK(Open(hasty).status());

  clock_.Advance(absl::Seconds(5) - absl::Nanoseconds(1));
  EXPECT_THAT(cache_.Idle(), IsEmpty());
  clock_.Advance(absl::Nanoseconds(1));
  EXPECT_THAT(cache_.Idle(), ElementsAre("hasty"));
  clock_.Advance(absl::Minutes(10));

  EXPECT_THAT(cache_.Idle(), ElementsAre("a", "hasty"));
}

}  // namespace
}  // namespace ebbtide::service
