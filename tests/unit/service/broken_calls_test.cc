// SPDX-License-Identifier: Apache-2.0
//
// An exception, as where memory runs out, comes out of each call that the engine makes of its
// device, its tiers and its carriers, one after the other; then the worker asks again. In the end
// it stands where a twin stands that never met with one: the same answers, scores and residents to
// the bit, the same bytes charged.

#include <algorithm>
#include <cstdint>
#include <new>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "service/engine.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/service/breakable_engine.h"

namespace ebbtide::service {
namespace {

using test::BreakableEngine;
using test::Breaker;
using test::Tokens;
using test::Worker;

// Calls `work` with the next call of a part ending in an exception, again and again until none
// does. Returns how often one did; `check` is called after each.
template <typename Work, typename Check>
int BreakEverywhere(Breaker& breaker, const Work& work, const Check& check) {
  for (int broken = 0;; ++broken) {
    breaker.BreakAt(broken);
    try {
      work();
      breaker.BreakAt(INT64_MAX);
      return broken;
    } catch (const std::bad_alloc&) {
      check();
    }
  }
}

void ExpectAlike(BreakableEngine& side, BreakableEngine& twin) {
  side.engine().CheckInvariants();
  EXPECT_EQ(side.stand.host_budget().used_bytes(), twin.stand.host_budget().used_bytes());
  const Stats stats = side.engine().GetStats();
  const Stats twins = twin.engine().GetStats();
  EXPECT_EQ(stats.tokens_appended, twins.tokens_appended);
  EXPECT_EQ(stats.tokens_demoted, twins.tokens_demoted);
  EXPECT_EQ(stats.tiers.front().used_bytes, twins.tiers.front().used_bytes);
  for (uint32_t lane = 0; lane < 4; ++lane) {
    const DescribeArgs args = {
        .sequence = "a", .with_tokens = true, .layer = lane / 2, .kv_head = lane % 2};
    const auto tokens = side.engine().Describe(args);
    const auto twins_tokens = twin.engine().Describe(args);
    ASSERT_OK(tokens.status());
    ASSERT_OK(twins_tokens.status());
    ASSERT_EQ(tokens->tokens.size(), twins_tokens->tokens.size());
    for (size_t i = 0; i < tokens->tokens.size(); ++i) {
      ASSERT_EQ(tokens->tokens[i].resident, twins_tokens->tokens[i].resident) << lane << ' ' << i;
      ASSERT_EQ(tokens->tokens[i].score, twins_tokens->tokens[i].score) << lane << ' ' << i;
    }
  }
}

// Policy, recall.
class BrokenCallsTest : public testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  const Tokens tokens_{.geometry = test::SmallGeometry()};
};

TEST_P(BrokenCallsTest, TeachAndTakeNothing) {
  BreakableEngine side(tokens_, {.recall_bytes = 1 << 15});  // Chunks are answered in tiles.
  BreakableEngine twin(tokens_, {.recall_bytes = 1 << 15});
  for (BreakableEngine* each : {&side, &twin}) {
    each->worker.open = {.policy = std::get<0>(GetParam()),
                         .prefill = "blockwise(24)",
                         .recall = std::get<1>(GetParam()),
                         .budget_tokens = 48,
                         .chunk_tokens = 24};
    ASSERT_OK(each->worker.Open().status());
  }
  int broken = 0;
  for (int32_t first = 0; first < 160;) {
    const bool is_prefill = first < 96 || first % 40 == 0;
    const int32_t count = is_prefill ? 24 : 4;
    for (int layer = 0; layer < tokens_.geometry.layers; ++layer) {
      const Worker::Call call = {.layer = layer,
                                 .first = first,
                                 .count = count,
                                 .phase = is_prefill ? Phase::kPrefill : Phase::kDecode};
      const StepAnswer twins = twin.worker.Step(call);
      ASSERT_OK(twins.status);
      const uint64_t used = side.stand.host_budget().used_bytes();
      StepAnswer answer;
      broken += BreakEverywhere(
          side.breaker, [&] { answer = side.worker.Step(call); },
          [&] {
            side.engine().CheckInvariants();
            EXPECT_EQ(side.stand.host_budget().used_bytes(), used);
          });
      ASSERT_OK(answer.status);
      EXPECT_FALSE(answer.replayed);
      EXPECT_EQ(answer.output, twins.output);
      EXPECT_EQ(answer.certificate.error_bound, twins.certificate.error_bound);
      EXPECT_EQ(answer.certificate.met, twins.certificate.met);
      // What is there stays there, and its retry stays one, in the layers before too.
      for (const bool appends : {true, false}) {
        for (int each = layer; each >= 0; --each) {
          Worker::Call again = call;
          again.layer = each;
          again.appends = appends;
          const StepAnswer twins_again = twin.worker.Step(again);
          const auto repeat = [&] { answer = side.worker.Step(again); };
          broken += each < layer ? (repeat(), 0) : BreakEverywhere(side.breaker, repeat, [&] {
            side.engine().CheckInvariants();
          });
          ASSERT_OK(answer.status);
          EXPECT_EQ(answer.replayed, appends);
          EXPECT_EQ(answer.output, twins_again.output);
        }
      }
      ExpectAlike(side, twin);
      if (testing::Test::HasFailure()) return;
    }
    for (BreakableEngine* each : {&side, &twin}) {
      each->engine().CloseIdle();  // Kicks carriers, where a broken kick did not.
      each->carriers.RunAll();
    }
    first += count;
  }
  EXPECT_GT(broken, 100);
}

INSTANTIATE_TEST_SUITE_P(
    EveryPolicy, BrokenCallsTest,
    testing::Values(std::tuple("h2o", "exact"), std::tuple("h2o+caote", "bounded(0.1)"),
                    std::tuple("tova+fastcaote", "estimated(0.1)"),
                    std::tuple("snapkv+caote", "bounded(0.000001)"),
                    std::tuple("keydiff", "bounded(0.1)"), std::tuple("streaming", "off")),
    [](const auto& test) {
      std::string name = std::string(std::get<0>(test.param)) + "_" + std::get<1>(test.param);
      std::erase_if(name, [](char c) { return c == '(' || c == ')' || c == '.'; });
      std::ranges::replace(name, '+', '_');
      return name;
    });

}  // namespace
}  // namespace ebbtide::service
