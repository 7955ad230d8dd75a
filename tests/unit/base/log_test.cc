// SPDX-License-Identifier: Apache-2.0
//
// The log is written to a temporary file and read back, line by line.

#include "base/log.h"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/status_matchers.h"

namespace ebbtide {
namespace {

using test::IsOkAndHolds;
using test::StatusIs;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::MatchesRegex;
using testing::SizeIs;

class LogTest : public testing::Test {
 protected:
  ~LogTest() override {
    SetUpLog(LogOptions{});
    std::fclose(file_);
  }

  void SetUpIn(LogForm form, LogLevel level = LogLevel::kInfo) {
    SetUpLog({.level = level, .form = form, .fd = ::fileno(file_)});
  }

  std::vector<std::string> Lines() {
    EXPECT_TRUE(FlushLog(absl::Seconds(10)));
    std::string text;
    std::rewind(file_);
    for (int c = std::fgetc(file_); c != EOF; c = std::fgetc(file_)) {
      text.push_back(static_cast<char>(c));
    }
    std::vector<std::string> lines = absl::StrSplit(text, '\n');
    EXPECT_EQ(lines.back(), "") << "the last line has no end";
    lines.pop_back();
    return lines;
  }

  std::FILE* const file_ = std::tmpfile();
};

TEST_F(LogTest, TextLineHasTimeLevelEventAndFields) {
  SetUpIn(LogForm::kText);

  Log(LogLevel::kWarn, "tier is degraded", {{"tier", "rocksdb"}, {"free_bytes", 65536}});

  const std::vector<std::string> lines = Lines();
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_THAT(lines[0], MatchesRegex("[0-9:]+\\.[0-9]+ warn  tier is degraded "
                                     "tier=rocksdb free_bytes=65536"));
}

TEST_F(LogTest, TextQuotesWhatWouldBreakTheLine) {
  SetUpIn(LogForm::kText);

  Log(LogLevel::kInfo, "read", {{"path", "a b"}, {"why", "x\ny"}, {"none", ""}});

  const std::vector<std::string> lines = Lines();
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_THAT(lines[0], HasSubstr(R"(path="a b" why="x\ny" none="")"));
}

TEST_F(LogTest, TextHasNothingThatATerminalObeys) {
  SetUpIn(LogForm::kText);

  Log(LogLevel::kInfo, "re\x1b[2Jad\n",
      {{"a", "\x1b[31m"},
       {"b", "\x7f"},
       {"c", "\xc2\x9b"},
       {"d", "caf\xe9"},
       {"e", "caf\xc3\xa9"}});

  const std::vector<std::string> lines = Lines();
  ASSERT_THAT(lines, SizeIs(1));
  EXPECT_THAT(lines[0],
              HasSubstr("re\\x1b[2Jad\\x0a a=\"\\u001b[31m\" b=\"\\x7f\" c=\"\\xc2\\x9b\" "
                        "d=\"caf\xef\xbf\xbd\" e=caf\xc3\xa9"));
}

TEST_F(LogTest, JsonLineParsesAndKeepsTypes) {
  SetUpIn(LogForm::kJson);

  Log(LogLevel::kError, "lost \"page\"\n",
      {{"count", 3u}, {"ratio", 0.5}, {"durable", true}, {"key", "a\"b\\c"}});

  const std::vector<std::string> lines = Lines();
  ASSERT_THAT(lines, SizeIs(1));
  const auto line = nlohmann::json::parse(lines[0]);
  EXPECT_EQ(line["level"], "error");
  EXPECT_EQ(line["event"], "lost \"page\"\n");
  EXPECT_EQ(line["count"], 3);
  EXPECT_EQ(line["ratio"], 0.5);
  EXPECT_EQ(line["durable"], true);
  EXPECT_EQ(line["key"], "a\"b\\c");
  EXPECT_THAT(line["time"].get<std::string>(),
              MatchesRegex("[0-9]+-[0-9]+-[0-9]+T[0-9]+:[0-9]+:[0-9]+\\.[0-9]+Z"));
}

TEST_F(LogTest, JsonSurvivesBytesThatAreNoText) {
  SetUpIn(LogForm::kJson);

  Log(LogLevel::kInfo, "odd", {{"bytes", "\xff\x01"}, {"nan", std::nan("")}, {"percent", "{}%v"}});

  const std::vector<std::string> lines = Lines();
  ASSERT_THAT(lines, SizeIs(1));
  const auto line = nlohmann::json::parse(lines[0]);
  EXPECT_EQ(line["nan"], "nan");
  EXPECT_EQ(line["percent"], "{}%v");
}

TEST_F(LogTest, LowerLevelsAreLeftOut) {
  SetUpIn(LogForm::kText, LogLevel::kWarn);

  Log(LogLevel::kDebug, "no");
  Log(LogLevel::kInfo, "no");
  EXPECT_THAT(Lines(), IsEmpty());

  Log(LogLevel::kWarn, "yes");
  Log(LogLevel::kError, "yes");
  EXPECT_THAT(Lines(), SizeIs(2));
}

TEST_F(LogTest, LinesOfSeveralThreadsStayWhole) {
  SetUpIn(LogForm::kJson);
  {
    std::vector<std::jthread> writers;
    for (int writer = 0; writer < 4; ++writer) {
      writers.emplace_back([writer] {
        for (int i = 0; i < 50; ++i) {
          Log(LogLevel::kInfo, "line", {{"writer", writer}, {"i", i}});
        }
      });
    }
  }

  const std::vector<std::string> lines = Lines();
  ASSERT_THAT(lines, SizeIs(200));
  for (const std::string& line : lines) {
    EXPECT_TRUE(nlohmann::json::accept(line)) << line;
  }
}

TEST_F(LogTest, AFileIsNoTerminal) {
  EXPECT_EQ(LogOptionsFor(LogLevel::kInfo, ::fileno(file_)).form, LogForm::kJson);
}

TEST(ParseLogLevelTest, KnowsTheFourWords) {
  EXPECT_THAT(ParseLogLevel("debug"), IsOkAndHolds(LogLevel::kDebug));
  EXPECT_THAT(ParseLogLevel("info"), IsOkAndHolds(LogLevel::kInfo));
  EXPECT_THAT(ParseLogLevel("warn"), IsOkAndHolds(LogLevel::kWarn));
  EXPECT_THAT(ParseLogLevel("error"), IsOkAndHolds(LogLevel::kError));
}

TEST(ParseLogLevelTest, OtherWordsAreRefused) {
  EXPECT_THAT(ParseLogLevel("verbose"),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("'verbose'"), HasSubstr("debug, info, warn"))));
}

}  // namespace
}  // namespace ebbtide
