// SPDX-License-Identifier: Apache-2.0
//
// What people read: tables, numbers, progress, and the texts of the watching verbs.

#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cli/json.h"
#include "client/cli/progress.h"
#include "client/cli/table.h"
#include "client/cli/units.h"
#include "client/cli/verbs.h"
#include "tests/support/fake_clock.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::cli {
namespace {

using test::StatusIs;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(TableTest, ColumnsAreAsWideAsTheirWidestCell) {
  Table table({{"name"}, {"tokens", Align::kRight}});
  table.AddRow({"a longer name", "7"});
  table.AddRow({"é", "1,234,567"});

  EXPECT_EQ(table.Render(),
            "name              tokens\n"
            "a longer name          7\n"
            "é              1,234,567\n");
}

TEST(TableTest, MissingCellsAreEmptyAndLinesHaveNoTrailingBlanks) {
  Table table({{"a"}, {"b"}});
  table.AddRow({"1"});

  EXPECT_EQ(table.Render(), "a  b\n1\n");
}

TEST(TableTest, ItsWidthIsThatOfItsLongestLine) {
  Table table({{"name", Align::kRight}, {"é", Align::kRight}});
  table.AddRow({"a longer name", "7"});

  EXPECT_EQ(table.Width(), DisplayWidth("a longer name  7"));
  EXPECT_EQ(Table({}).Width(), 0U);
}

TEST(TableTest, ANarrowColumnTakesNamesAlone) {
  EXPECT_EQ(WithoutArguments("snapkv(sinks=4,window=16)+caote"), "snapkv+caote");
  EXPECT_EQ(WithoutArguments("a(b(c)d)e"), "ae");
  EXPECT_EQ(WithoutArguments("h2o"), "h2o");
}

TEST(UnitsTest, BytesCarryThreeDigitsAndAUnit) {
  EXPECT_EQ(FormatBytes(0), "0 B");
  EXPECT_EQ(FormatBytes(1023), "1023 B");
  EXPECT_EQ(FormatBytes(1536), "1.50 KiB");
  EXPECT_EQ(FormatBytes(uint64_t{12} << 30), "12.0 GiB");
  EXPECT_EQ(FormatBytes((uint64_t{1} << 20) - 1), "1.00 MiB");
  EXPECT_EQ(FormatBytes(~uint64_t{0}), "16.0 EiB");
}

TEST(UnitsTest, CountsAreGrouped) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(1000), "1,000");
  EXPECT_EQ(FormatCount(1234567), "1,234,567");
}

TEST(UnitsTest, TimesTakeTheUnitThatFits) {
  EXPECT_EQ(FormatElapsed(absl::ZeroDuration()), "0 s");
  EXPECT_EQ(FormatElapsed(absl::Microseconds(45)), "45.0 us");
  EXPECT_EQ(FormatElapsed(absl::Microseconds(1200)), "1.20 ms");
  EXPECT_EQ(FormatElapsed(absl::Seconds(3)), "3.00 s");
  EXPECT_EQ(FormatElapsed(absl::Minutes(125)), "2 h 5 min");
  EXPECT_EQ(FormatElapsed(absl::Hours(75)), "3 d 3 h");
}

TEST(UnitsTest, NumbersStayShort) {
  EXPECT_EQ(FormatNumber(0), "0");
  EXPECT_EQ(FormatNumber(0.02134), "0.0213");
  EXPECT_EQ(FormatNumber(3.14e-7), "3.1e-07");
  EXPECT_EQ(FormatNumber(12.44), "12.4");
  EXPECT_EQ(FormatNumber(-12.44), "-12.4");
  EXPECT_EQ(FormatPercent(0.125), "12.5 %");
  EXPECT_EQ(FormatPercent(0), "0 %");
  EXPECT_EQ(FormatPercent(3e-7), "< 0.001 %");
}

// A stream whose text can be read back.
class ProgressTest : public testing::Test {
 protected:
  ~ProgressTest() override { std::fclose(stream_); }

  std::string Written() {
    std::fflush(stream_);
    std::rewind(stream_);
    std::string text(1000, '\0');
    text.resize(std::fread(text.data(), 1, text.size(), stream_));
    return text;
  }

  test::FakeClock clock_;
  std::FILE* stream_ = std::tmpfile();
};

TEST_F(ProgressTest, WhatTakesLessThanASecondIsSilent) {
  {
    Progress progress("replay", 10, stream_, true, clock_);
    clock_.Advance(absl::Milliseconds(999));
    progress.Update(5);
  }

  EXPECT_EQ(Written(), "");
}

TEST_F(ProgressTest, ATerminalGetsOneLineThatIsWipedAtTheEnd) {
  {
    Progress progress("replay", 10, stream_, true, clock_);
    clock_.Advance(absl::Seconds(2));
    progress.Update(5);
  }

  const std::string line = "replay: 50 % (5 of 10, 2.00 s)";
  EXPECT_EQ(Written(), "\r" + line + "\r" + std::string(line.size(), ' ') + "\r");
}

TEST_F(ProgressTest, ALogGetsALineEveryFiveSeconds) {
  {
    Progress progress("replay", 10, stream_, false, clock_);
    for (uint64_t second = 1; second <= 10; ++second) {
      clock_.Advance(absl::Seconds(1));
      progress.Update(second);
    }
  }

  EXPECT_EQ(Written(), "replay: 50 % (5 of 10, 5.00 s)\nreplay: 100 % (10 of 10, 10.0 s)\n");
}

TEST(StatusVerbTest, TiersSayWhatTheyHoldOfWhatTheyMay) {
  const client::Stats stats{.tiers = {{.tier = client::Tier::kHost,
                                       .budget_bytes = 4096,
                                       .used_bytes = 1024,
                                       .blocks = 3,
                                       .tokens = 1234}}};

  EXPECT_THAT(RenderTiers(stats),
              HasSubstr("host  ok     1.00 KiB  4.00 KiB  25.0 %       3        1,234"));
  EXPECT_THAT(Complaints(stats), testing::IsEmpty());
}

// A slot holds a copy, a lane-token lies in one place: no column mixes them.
TEST(StatusVerbTest, ColumnsSayWhatTheyCount) {
  const std::string tiers = RenderTiers({});
  const std::string sequences = RenderSequences({client::SequenceSummary{}});

  EXPECT_THAT(tiers, testing::ContainsRegex("blocks  lane-tokens  corrupt reads"));
  EXPECT_THAT(sequences, HasSubstr("tokens  budget  device slots  lane-tokens in host  in rocksdb  "
                                   "in open blocks  idle"));
}

TEST(StatusVerbTest, ADegradedTierAndLostPagesAreComplaints) {
  const client::Stats stats{.tiers = {{.tier = client::Tier::kRocksdb,
                                       .corrupt_pages = 2,
                                       .degraded = true,
                                       .degraded_why = "disk full"}},
                            .pages_lost = {{"MISSING_PAGE", 3}}};

  EXPECT_THAT(Complaints(stats), ElementsAre("rocksdb tier is degraded: disk full",
                                             HasSubstr("2 reads of pages failed their checksum"),
                                             HasSubstr("lost pages: 3 (MISSING_PAGE 3)")));
}

TEST(StatusVerbTest, AnswersAreThoseOfDecode) {
  const client::Stats stats{
      .answers = 9, .answers_with_target = 7, .answers_not_met = {{"ESTIMATED", 5}}};

  EXPECT_THAT(RenderStatus({}, stats),
              HasSubstr("answers    9 in decode; with recall 7, of them not met 5 (ESTIMATED 5)"));
}

TEST(StatusVerbTest, RefusalsAreNamedByReason) {
  const client::Stats stats{.refused = {{"DEVICE_FULL", 2}, {"INDEX_GAP", 1}}};

  EXPECT_THAT(RenderStatus({}, stats), HasSubstr("refused    3 (DEVICE_FULL 2, INDEX_GAP 1)"));
}

TEST(StatusVerbTest, FailuresOfCarriersAreNamedByReason) {
  const client::Stats stats{.blocks_sealed = 5, .carries_failed = {{"DEVICE_LOST", 2}}};

  EXPECT_THAT(RenderStatus({}, stats),
              HasSubstr("5 sealed, 0 moved down to rocksdb; failed 2 (DEVICE_LOST 2)"));
}

TEST(StatusVerbTest, ASimulatedDeviceIsCalledSo) {
  EXPECT_THAT(RenderStatus({.backend = "cpu", .simulated_device = true}, {}),
              HasSubstr("cpu, simulated device (host memory)"));
}

TEST(DescribeVerbTest, ALaneIsNamedByLayerAndHead) {
  ASSERT_OK_AND_ASSIGN(const client::LaneId lane, ParseLane("15/2"));

  EXPECT_EQ(lane.layer, 15U);
  EXPECT_EQ(lane.kv_head, 2U);
  for (const char* text : {"", "15", "15/", "/2", "15/2/3", "-1/2", "a/b"}) {
    EXPECT_THAT(ParseLane(text), StatusIs(absl::StatusCode::kInvalidArgument)) << text;
  }
}

client::SequenceDescription TwoLayers() {
  return {.summary = {.name = "s"},
          .lanes = {{.layer = 0, .kv_head = 0, .length = 111},
                    {.layer = 1, .kv_head = 0, .length = 222}}};
}

client::SequenceSummary LongNames() {
  return {.name = "replay-123456-1",
          .model = "SmolLM2-135M-Instruct [2x 9/3 heads of 64, f16, scale 0.125]",
          .policy = "snapkv(sinks=4,recent=128,window=16,kernel=5)+caote",
          .recall = "estimated(0.02)",
          .prefill = "blockwise(128)",
          .committed = 4096,
          .budget_tokens = 512,
          .idle = absl::Milliseconds(12.3),
          .tokens = {.device = 6144, .host = 12345, .rocksdb = 123456, .open = 128}};
}

TEST(DescribeVerbTest, AListOfSequencesFitsAWideTerminal) {
  const std::string text = RenderSequences({LongNames()});

  EXPECT_THAT(text, HasSubstr("replay-123456-1  snapkv+caote   4,096     512         6,144 "));
  EXPECT_LE(text.find('\n'), 120U) << text;
  EXPECT_LE(text.size() - text.find('\n'), 122U) << text;
}

TEST(DescribeVerbTest, OneSequenceIsDescribedInFull) {
  const std::string text = RenderDescription({.summary = LongNames()});

  for (const char* line :
       {"model        SmolLM2-135M-Instruct [2x 9/3 heads of 64, f16, scale 0.125]\n",
        "policy       snapkv(sinks=4,recent=128,window=16,kernel=5)+caote\n",
        "recall       estimated(0.02)\n", "prefill      blockwise(128)\n",
        "tokens       4,096 in every layer, budget 512 per lane\n",
        "lane-tokens  12,345 in host, 123,456 in rocksdb, 128 in open blocks\n"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
}

TEST(DescribeVerbTest, OnlyTheLaneAskedForIsShown) {
  ASSERT_OK_AND_ASSIGN(const client::SequenceDescription one,
                       OnlyLane(TwoLayers(), {.layer = 1, .kv_head = 0}));

  for (const std::string& text : {RenderDescription(one), ToJson(one).dump()}) {
    EXPECT_THAT(text, HasSubstr("222"));
    EXPECT_THAT(text, testing::Not(HasSubstr("111")));
  }
}

TEST(DescribeVerbTest, ALaneThatIsNotThereIsRefusedWithThoseThatAre) {
  for (const client::LaneId lane : {client::LaneId{.layer = 15}, client::LaneId{.kv_head = 1}}) {
    EXPECT_THAT(OnlyLane(TwoLayers(), lane),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         absl::StrFormat("lane %u/%u: sequence \"s\" has layers 0 to 1 and kv "
                                         "heads 0 to 0",
                                         lane.layer, lane.kv_head)));
  }
}

TEST(JsonTest, KeysKeepTheOrderOfTheWire) {
  EXPECT_EQ(ToJson(client::TokensByTier{.device = 1, .host = 2, .rocksdb = 3, .open = 4}).dump(),
            R"({"device":1,"host":2,"rocksdb":3,"open":4})");
}

}  // namespace
}  // namespace ebbtide::cli
