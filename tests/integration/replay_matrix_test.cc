// SPDX-License-Identifier: Apache-2.0
//
// Every policy under every way to prefill and to recall, on a recorded model over the wire at a
// small budget: no certificate is violated, every byte comes back, and a target that is promised is
// met.

#include <algorithm>
#include <cctype>
#include <map>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/integration/replay_stand.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::test {
namespace {

using cli::RunReport;

class ReplayMatrixTest : public testing::TestWithParam<const char*> {};

TEST_P(ReplayMatrixTest, IsSoundAndMeetsWhatItPromises) {
  for (const char* prefill : {"exact", "blockwise(32)"}) {
    std::map<std::string, RunReport> runs;
    for (const char* recall : {"off", "bounded(0.02)", "estimated(0.02)", "exact"}) {
      const std::string name = std::string(prefill) + ", " + recall;
      ReplayStand stand({});
      ASSERT_OK_AND_ASSIGN(const RunReport run, stand.Play({.policy = GetParam(),
                                                            .recall = recall,
                                                            .prefill = prefill,
                                                            .budget = {.tokens = 48},
                                                            .chunk = 32}));

      EXPECT_EQ(run.certificate_violations, 0U) << name;
      EXPECT_EQ(run.byte_mismatches, 0U) << name;
      EXPECT_EQ(run.bytes_lost, 0U) << name;
      EXPECT_EQ(run.bytes_checked, TheSmallTrace().trace.kv_bytes()) << name;
      EXPECT_GT(run.demotions, 0U) << name;
      runs[recall] = run;
    }
    const RunReport& exact = runs["exact"];
    const RunReport& bounded = runs["bounded(0.02)"];
    EXPECT_EQ(exact.not_met, 0U) << prefill;
    EXPECT_LT(exact.rel_error.max, 1e-5) << prefill;
    EXPECT_EQ(bounded.not_met, 0U) << prefill;
    EXPECT_EQ(bounded.answers_above_target, 0.0) << prefill;
    EXPECT_EQ(runs["off"].touched_bytes.total, 0) << prefill;
    // On this trace climbing pays: what proof needs is less than all.
    EXPECT_LT(bounded.touched_bytes.total, exact.touched_bytes.total) << prefill;
    EXPECT_LT(runs["estimated(0.02)"].touched_bytes.total, bounded.touched_bytes.total) << prefill;
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, ReplayMatrixTest,
                         testing::Values("streaming", "keydiff", "h2o", "h2o+caote",
                                         "h2o+fastcaote", "tova", "tova+caote", "tova+fastcaote",
                                         "snapkv", "snapkv+caote", "snapkv+fastcaote"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::ranges::replace(name, '+', '_');
                           return name;
                         });

}  // namespace
}  // namespace ebbtide::test
