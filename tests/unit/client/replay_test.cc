// SPDX-License-Identifier: Apache-2.0
//
// From what is typed to what is run, and from what is found to what is printed.

#include "client/cli/replay.h"

#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "client/cli/report.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::cli {
namespace {

using absl::StatusCode;
using test::IsOkAndHolds;
using test::StatusIs;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(SplitListTest, CommasInParenthesesDoNotSplit) {
  EXPECT_THAT(SplitList("--policy", "streaming(sinks=4,recent=8),h2o"),
              IsOkAndHolds(ElementsAre("streaming(sinks=4,recent=8)", "h2o")));
}

TEST(SplitListTest, EmptyEntriesAndOpenParenthesesAreRefused) {
  for (const char* text : {"", "a,", ",a", "a,,b"}) {
    EXPECT_THAT(SplitList("--policy", text),
                StatusIs(StatusCode::kInvalidArgument, HasSubstr("is empty")))
        << text;
  }
  for (const char* text : {"a(", "a)", "a)(", "a((b)"}) {
    EXPECT_THAT(SplitList("--policy", text),
                StatusIs(StatusCode::kInvalidArgument, HasSubstr("do not match")))
        << text;
  }
}

TEST(ParseBudgetTest, TakesTokensOrAShareOfTheTrace) {
  ASSERT_OK_AND_ASSIGN(const client::Budget tokens, ParseBudget("512", 4096));
  ASSERT_OK_AND_ASSIGN(const client::Budget share, ParseBudget("12.5%", 4096));

  EXPECT_EQ(tokens.tokens, 512U);
  EXPECT_EQ(tokens.percent, 0);
  EXPECT_EQ(share.percent, 12.5);
  EXPECT_EQ(share.of_tokens, 4096U);
  ASSERT_OK_AND_ASSIGN(const client::Budget spaced, ParseBudget("50 %", 4096));
  EXPECT_EQ(spaced.percent, 50);
}

TEST(ParseBudgetTest, RefusesWhatIsNeither) {
  for (const char* text : {"",
                           "0",
                           "-1",
                           "1.5",
                           "0%",
                           "101%",
                           "nan%",
                           "x%",
                           "%",
                           "+5",
                           " 5",
                           "5 ",
                           "0x10",
                           "1e1%",
                           "-5%",
                           "+5%",
                           "5  %",
                           " %",
                           "1.2.3%",
                           "100.5%",
                           "16777217",
                           "4294967296",
                           "99999999999999999999"}) {
    EXPECT_THAT(ParseBudget(text, 4096),
                StatusIs(StatusCode::kInvalidArgument,
                         absl::StrFormat("--budget \"%s\": give 1 to 16,777,216 tokens per lane, "
                                         "such as 512, or a percentage over 0 %% and up to 100 %% "
                                         "of the trace, such as 12.5%%",
                                         text)))
        << text;
  }
  EXPECT_OK(ParseBudget("16777216", 4096));
}

TEST(PlanRunsTest, AChunkThatIsNoneIsRefused) {
  for (const char* chunk : {"0", "-1", "x", "1.5", "4294967296"}) {
    EXPECT_THAT(PlanRuns({.policies = "h2o", .budget = "10", .chunk = chunk}, 100),
                StatusIs(StatusCode::kInvalidArgument,
                         AllOf(HasSubstr(absl::StrFormat("--chunk \"%s\"", chunk)),
                               HasSubstr("from 1 to what the daemon takes (512)"))))
        << chunk;
  }
}

TEST(PlanRunsTest, EveryCombinationIsOneRun) {
  ASSERT_OK_AND_ASSIGN(const std::vector<RunSpec> specs,
                       PlanRuns({.policies = "a,b",
                                 .budget = "10",
                                 .recalls = "off,exact",
                                 .prefills = "exact,blockwise(64)",
                                 .chunk = "7"},
                                100));

  ASSERT_EQ(specs.size(), 8U);
  EXPECT_EQ(specs[0].policy, "a");
  EXPECT_EQ(specs[1].prefill, "blockwise(64)");
  EXPECT_EQ(specs[2].recall, "exact");
  EXPECT_EQ(specs[7].policy, "b");
  EXPECT_EQ(specs[7].chunk, 7U);
}

TEST(PlanRunsTest, WhatIsNotSaidIsLeftToTheDaemon) {
  ASSERT_OK_AND_ASSIGN(const std::vector<RunSpec> specs,
                       PlanRuns({.policies = "auto", .budget = "10"}, 100));

  ASSERT_EQ(specs.size(), 1U);
  EXPECT_EQ(specs[0].recall, "");
  EXPECT_EQ(specs[0].prefill, "");
}

ReplayReport OneRun() {
  RunReport run{.policy = "h2o", .recall = "off", .prefill = "exact"};
  run.rel_error = {.mean = 0.1, .p50 = 0.2, .p99 = 0.3, .max = 0.4, .count = 5};
  run.certified_rel_error = {.mean = 1.1, .p50 = 1.2, .p99 = 1.3, .max = 1.4, .count = 5};
  run.step_seconds = {.p50 = 0.5, .p99 = 0.6, .count = 5};
  run.touched_pages = {.total = 3, .by_rung = {{"pages", 3}}, .by_tier = {{"rocksdb", 3}}};
  return {.trace = "t.safetensors", .steps = 5, .layers = {15}, .prompt_length = 9, .runs = {run}};
}

std::vector<std::string> Keys(const Json& json) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : json.items()) keys.push_back(key);
  return keys;
}

TEST(ReportJsonTest, FieldsAreThoseThatReadersRelyOn) {
  const Json json = ToJson(OneRun());

  EXPECT_THAT(Keys(json), ElementsAre("trace", "steps", "layers", "prompt_length", "backend",
                                      "simulated_device", "runs"));
  EXPECT_THAT(Keys(json["runs"][0]),
              ElementsAre("policy", "policy_resolved", "recall", "prefill", "budget_tokens",
                          "protected_tokens", "host_budget_bytes", "rel_error", "certified_error",
                          "prefill_rel_error", "worst_head_rel_error", "certificate_violations",
                          "not_met", "answers_above_target", "bytes_checked", "byte_mismatches",
                          "bytes_lost", "bytes_checked_by_tier", "tokens", "demotions",
                          "absent_pages", "touched_pages_per_step", "touched_bytes_per_step",
                          "bound_over_error", "step_seconds", "wall_seconds"));
  const Json& run = json["runs"][0];
  EXPECT_EQ(run["rel_error"].dump(), R"({"mean":0.1,"p50":0.2,"p99":0.3,"max":0.4})");
  EXPECT_EQ(run["certified_error"].dump(), R"({"mean":1.1,"p50":1.2,"p99":1.3,"max":1.4})");
  EXPECT_EQ(run["not_met"].dump(), R"({"count":0,"by_reason":{}})");
  EXPECT_EQ(run["touched_pages_per_step"].dump(),
            R"({"total":3.0,"by_rung":{"pages":3.0},"by_tier":{"rocksdb":3.0}})");
  EXPECT_TRUE(run["answers_above_target"].is_null());
  EXPECT_THAT(Keys(run["step_seconds"]), ElementsAre("p50", "p99"));
  EXPECT_THAT(Keys(run["tokens"]), ElementsAre("device", "host", "rocksdb", "open"));
}

// The paths of all nulls.
std::vector<std::string> Nulls(const Json& json, const std::string& path = "") {
  std::vector<std::string> nulls;
  if (json.is_null()) return {path};
  if (!json.is_object()) return {};
  for (const auto& [key, value] : json.items()) {
    for (std::string& below : Nulls(value, path + "." + key)) nulls.push_back(std::move(below));
  }
  return nulls;
}

TEST(ReportJsonTest, WhatWasNotMeasuredIsNullAndADash) {
  ReplayReport report = OneRun();
  EXPECT_THAT(
      Nulls(ToJson(report)["runs"][0]),
      ElementsAre(".prefill_rel_error.mean", ".prefill_rel_error.p50", ".prefill_rel_error.p99",
                  ".prefill_rel_error.max", ".answers_above_target", ".bound_over_error.p50"));

  report.steps = 0;
  report.runs = {{.policy = "h2o", .recall = "bounded(0.02)", .prefill = "exact"}};
  report.runs[0].prefill_rel_error = {.mean = 0.1, .p50 = 0.2, .p99 = 0.3, .max = 0.4, .count = 9};

  EXPECT_THAT(
      Nulls(ToJson(report)["runs"][0]),
      ElementsAre(".rel_error.mean", ".rel_error.p50", ".rel_error.p99", ".rel_error.max",
                  ".certified_error.mean", ".certified_error.p50", ".certified_error.p99",
                  ".certified_error.max", ".worst_head_rel_error", ".answers_above_target",
                  ".absent_pages", ".touched_pages_per_step.total", ".touched_bytes_per_step.total",
                  ".bound_over_error.p50", ".step_seconds.p50", ".step_seconds.p99"));
  const std::string text = RenderReport(report);
  for (const char* line : {"relative error mean", "  worst head", "  certified p50", "absent pages",
                           "  touched per step", "  bytes per step", "step p50"}) {
    EXPECT_THAT(text, testing::ContainsRegex(std::string(line) + " +-\n"));
  }
  EXPECT_THAT(text, testing::ContainsRegex("  prefill max +0\\.4\n"));
}

TEST(ReportTableTest, RunsStandSideBySide) {
  ReplayReport report = OneRun();
  report.runs.push_back(report.runs.front());
  report.runs.back().policy = "snapkv+caote";

  const std::string text = RenderReport(report);

  EXPECT_THAT(text, HasSubstr("t.safetensors: 9 prompt tokens, then 5 decode steps; layers 15 of "
                              "the model (0 to the daemon)\n"));
  EXPECT_THAT(text, testing::ContainsRegex("policy +h2o +snapkv\\+caote\n"));
  EXPECT_THAT(text, testing::ContainsRegex("touched pages: pages +3.00 +3.00\n"));
}

TEST(ReportTableTest, LayersThatTheDaemonNumbersAlikeAreNamedOnce) {
  ReplayReport report = OneRun();
  report.layers = {0, 1};
  EXPECT_THAT(RenderReport(report), HasSubstr("layers 0, 1 of the model\n"));

  report.layers = {1, 0};
  EXPECT_THAT(RenderReport(report), HasSubstr("layers 1, 0 of the model (0, 1 to the daemon)\n"));
}

TEST(ReportTableTest, AutoIsShownAsWhatItBecame) {
  ReplayReport report = OneRun();
  report.runs[0].policy = "auto";
  report.runs[0].policy_resolved = "snapkv(sinks=4,recent=8,window=16,kernel=5)+caote";

  EXPECT_THAT(RenderReport(report), HasSubstr(" auto: snapkv+caote\n"));
}

TEST(ReportTableTest, RunsThatDoNotFitSideBySideHaveARowEach) {
  ReplayReport report = OneRun();
  report.runs[0].budget_tokens = 512;
  for (int i = 1; i < 48; ++i) report.runs.push_back(report.runs.front());
  report.runs[7].recall = "bounded(0.02)";
  report.runs[8].certificate_violations = 2;
  report.runs[8].bytes_lost = 512;

  std::string text = RenderReport(report);

  EXPECT_THAT(text, HasSubstr("budget per lane 512, host budget 0 B, prefill exact\n"));
  EXPECT_THAT(text, testing::ContainsRegex("policy +recall +error p50 +p99 +certified p50"));
  EXPECT_THAT(text, testing::ContainsRegex(
                        "h2o +bounded\\(0.02\\) +0.2 +0.3 +1.20 +- +0 +yes +0 B +500 ms\n"));
  EXPECT_THAT(text, HasSubstr("not sound: h2o, off, exact: 2 certificate violations, 0 mismatches, "
                              "512 B lost\n"));
  EXPECT_THAT(text, HasSubstr("-o json has all numbers of each run"));
  for (const std::string& line : std::vector<std::string>(absl::StrSplit(text, '\n'))) {
    EXPECT_LE(line.size(), 120U) << line;
  }

  report.runs[7].prefill = "blockwise(64)";
  text = RenderReport(report);
  EXPECT_THAT(text, testing::ContainsRegex("h2o +bounded\\(0.02\\) +blockwise\\(64\\) +0.2"));
  EXPECT_THAT(text, testing::Not(HasSubstr(", prefill exact")));
}

TEST(ReportTableTest, TouchedPagesComeInTheOrderOfTheLadderAndOfTheJson) {
  ReplayReport report = OneRun();
  report.runs[0].touched_pages = {
      .total = 9,
      .by_rung = {{"exact", 1}, {"unheard-of", 1}, {"coarse", 1}, {"fine", 1}, {"digest", 1}},
      .by_tier = {{"rocksdb", 4}, {"host", 5}}};

  EXPECT_THAT(Keys(ToJson(report)["runs"][0]["touched_pages_per_step"]["by_rung"]),
              ElementsAre("digest", "coarse", "fine", "exact", "unheard-of"));
  std::string text = RenderReport(report);
  for (const char* line :
       {"absent pages ", "  touched per step ", "touched pages: digest ", "touched pages: coarse ",
        "touched pages: fine ", "touched pages: exact ", "touched pages: unheard-of ",
        "touched pages in host ", "touched pages in rocksdb ", "  bytes per step ", "step p50 "}) {
    const size_t at = text.find(line);
    ASSERT_NE(at, std::string::npos) << line << "\n" << RenderReport(report);
    text = text.substr(at);
  }
}

TEST(ReportTest, OneUnsoundRunMakesTheReportUnsound) {
  ReplayReport report = OneRun();
  EXPECT_TRUE(report.is_sound());

  report.runs.push_back(report.runs.front());
  report.runs.back().byte_mismatches = 1;
  EXPECT_FALSE(report.is_sound());

  report.runs.back() = {.bytes_lost = 1};
  EXPECT_FALSE(report.is_sound());

  report.runs.back() = {.certificate_violations = 1};
  EXPECT_FALSE(report.is_sound());
}

}  // namespace
}  // namespace ebbtide::cli
