// SPDX-License-Identifier: Apache-2.0
//
// What the demo's daemon is told, by the daemon's own parser, and what the demo says of its runs.

#include "client/cli/demo.h"

#include <algorithm>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "service/config/load_config.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/client/synthetic_trace.h"

namespace ebbtide::cli {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;

constexpr uint64_t kMiB = 1 << 20;

Trace SmallTrace() {
  return *ParseTrace(MakeSyntheticFile({}).Bytes(), {});
}

service::Surroundings Machine() {
  service::Surroundings machine;
  machine.memory_bytes = 8192 * kMiB;
  machine.disk = [](const std::string&) {
    return service::DiskSpace{.capacity_bytes = 100000 * kMiB, .free_bytes = 50000 * kMiB};
  };
  return machine;
}

TEST(DemoPlanTest, ItsConfigurationIsOneThatTheDaemonTakes) {
  const DemoPlan plan = PlanDemo(SmallTrace(), "/tmp/demo");

  const service::LoadedConfig loaded = service::LoadConfig(plan.config(), Machine());

  EXPECT_EQ(service::FormatMistakes("demo", loaded.mistakes), "");
  EXPECT_EQ(loaded.config.server.listen.socket_path, "/tmp/demo/ebbtide.sock");
  EXPECT_EQ(loaded.config.host.budget_bytes, plan.host_budget_bytes);
  EXPECT_EQ(loaded.config.device.budget_bytes, plan.device_budget_bytes);
  EXPECT_EQ(loaded.config.rocksdb.budget_bytes, plan.rocksdb_budget_bytes);
  EXPECT_EQ(loaded.config.rocksdb.path, "/tmp/demo/rocksdb");
}

TEST(DemoPlanTest, TheHostTierTakesAQuarterOfALargeTrace) {
  Trace trace = SmallTrace();
  trace.tokens = 1 << 20;  // Its size is all that is looked at.

  const DemoPlan plan = PlanDemo(trace, "/tmp/demo");

  // As much again is for the digests of what is absent.
  EXPECT_EQ(plan.host_budget_bytes, trace.kv_bytes() / 4 + trace.kv_bytes() / 4);
  EXPECT_GT(plan.rocksdb_budget_bytes, trace.kv_bytes());
}

TEST(DemoTest, TheRecordedTraceIsFoundFromTheBuildFolder) {
  ASSERT_OK_AND_ASSIGN(const std::string path, FindDemoTrace());

  EXPECT_THAT(path, HasSubstr("tests/data/traces/smollm2-kjv-4096.safetensors"));
}

TEST(DemoTest, TheVerdictSumsAllRuns) {
  RunReport off{.policy = "snapkv+caote", .recall = "off"};
  off.bytes_checked = 1024;
  off.answers_above_target = 0.875;
  RunReport bounded{.policy = "snapkv+caote", .recall = "bounded(0.02)"};
  bounded.bytes_checked = 1024;
  bounded.byte_mismatches = 3;
  bounded.bytes_lost = 512;
  bounded.certificate_violations = 2;

  const std::string text = RenderDemo(SmallTrace(), {.runs = {off, bounded}});

  EXPECT_THAT(text, HasSubstr("read back and compared: 2.00 KiB, 3 mismatches, 512 B lost."));
  EXPECT_THAT(text, HasSubstr("held against its certificate: 2 violations."));
  EXPECT_THAT(text, ContainsRegex("snapkv\\+caote +off .* 87.5 %"));
}

std::string OnOneLine(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');  // Lines are broken where they are full.
  return text;
}

TEST(DemoTest, ABudgetOfMoreThanThereIsHoldsAllOfIt) {
  RunReport last{.policy = "streaming", .recall = "exact", .budget_tokens = 39};

  EXPECT_THAT(OnOneLine(RenderDemo(SmallTrace(), {.runs = {last}})),
              HasSubstr("holds 39 of 40 tokens per lane, and the token of the step."));

  last.budget_tokens = 5000;
  EXPECT_THAT(OnOneLine(RenderDemo(SmallTrace(), {.runs = {last}})),
              HasSubstr("holds all of 40 tokens per lane: its budget is 5,000."));
}

TEST(DemoTest, WhatWasNotDecodedHasNoNumbers) {
  const RunReport run{.policy = "streaming", .recall = "exact"};

  EXPECT_THAT(RenderDemo(SmallTrace(), {.runs = {run}}),
              ContainsRegex("streaming +exact( +-){8}\n"));
}

TEST(DemoTest, ItsNumbersSayWhatTheyCount) {
  RunReport last{.policy = "snapkv+caote", .recall = "exact"};
  last.tokens = {.device = 60, .host = 70, .rocksdb = 80, .open = 10};
  last.demotions = 100;

  const std::string text = OnOneLine(RenderDemo(SmallTrace(), {.runs = {last}}));

  EXPECT_THAT(text, HasSubstr("40 tokens in 4 lanes (layers: 2, kv heads: 2) are 160 lane-tokens, "
                              "a key and a value each. In the last run 100 of them left the "
                              "working set and 60 are there still."));
  EXPECT_THAT(text, HasSubstr("All are kept below it: 70 in host memory, 80 in RocksDB, 10 in "
                              "blocks still open."));
}

}  // namespace
}  // namespace ebbtide::cli
