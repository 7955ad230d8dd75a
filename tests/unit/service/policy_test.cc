// SPDX-License-Identifier: Apache-2.0

#include "service/policy/policy.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "service/reason.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::service {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(PolicyTest, TextOfAParsedPolicyParsesToTheSame) {
  for (const std::string text :
       {"streaming", "keydiff", "h2o", "tova", "snapkv", "h2o+caote", "tova+fastcaote",
        "snapkv(window=16, kernel=5)+caote", "streaming(sinks=8,recent=64)"}) {
    const auto spec = ParsePolicy(text);
    ASSERT_TRUE(spec.ok()) << text << ": " << spec.status();
    const auto again = ParsePolicy(PolicyText(*spec));
    ASSERT_TRUE(again.ok()) << PolicyText(*spec);
    EXPECT_EQ(*again, *spec) << text;
  }
}

TEST(PolicyTest, WrongWordsAreNamed) {
  for (const auto& [text, named] :
       {std::pair{"snapkw", "snapkw"}, std::pair{"h2o+vnorm", "vnorm"},
        std::pair{"h2o(sinks=-1)", "sinks"}, std::pair{"h2o(window=3)", "window"},
        std::pair{"snapkv(kernel=4)", "odd"}, std::pair{"snapkv(window=3", "parenthesis"},
        std::pair{"h2o(sinks=1,sinks=9)", "sinks is given twice"},
        std::pair{"keydiff+caote", "keydiff"}, std::pair{"h2o(sinks)", "sinks"}}) {
    EXPECT_THAT(ParsePolicy(text),
                test::StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(named)))
        << text;
  }
}

TEST(PolicyTest, AutoFollowsWhatTheWorkerSends) {
  const auto with = ResolvePolicy("auto", true, 512, 32);
  const auto without = ResolvePolicy("", false, 512, 32);

  ASSERT_TRUE(with.ok() && without.ok());
  EXPECT_EQ(PolicyText(with->spec), "snapkv(sinks=4,recent=128,window=32,kernel=7)+caote");
  EXPECT_EQ(PolicyText(without->spec), "keydiff(sinks=4,recent=128)");
}

TEST(PolicyTest, RecentDefaultsToAQuarterOfTheBudgetAtMost128) {
  EXPECT_EQ(ResolvePolicy("h2o", true, 200, 32)->spec.recent, 50);
  EXPECT_EQ(ResolvePolicy("h2o", true, 200, 32)->protected_tokens, 54);
  EXPECT_EQ(ResolvePolicy("h2o", true, 4096, 32)->protected_tokens, 132);
}

TEST(PolicyTest, BudgetMustExceedTheProtectedTokens) {
  EXPECT_THAT(
      ResolvePolicy("h2o", true, 36, 32),
      test::StatusIs(absl::StatusCode::kInvalidArgument, AllOf(HasSubstr("36"), HasSubstr("32"))));
  EXPECT_TRUE(ResolvePolicy("h2o", true, 37, 32).ok());
  EXPECT_EQ(ReasonOf(ResolvePolicy("h2o", true, 0, 32).status()), "BUDGET_TOO_SMALL");
}

TEST(PolicyTest, PolicyWithoutItsQueriesIsRefused) {
  EXPECT_EQ(ReasonOf(ResolvePolicy("snapkv", false, 512, 32).status()), "POLICY_NEEDS_QUERIES");
}

TEST(PolicyTest, RecallAndPrefillHaveATextForm) {
  EXPECT_EQ(RecallText(*ParseRecall("bounded(0.02)")), "bounded(0.02)");
  EXPECT_EQ(RecallText(*ParseRecall("estimated(0.1)")), "estimated(0.1)");
  EXPECT_EQ(RecallText(*ParseRecall("exact")), "exact");
  EXPECT_EQ(PrefillText(*ParsePrefill("")), "exact");
  EXPECT_EQ(PrefillText(*ParsePrefill("blockwise(128)")), "blockwise(128)");
  for (const std::string text :
       {"bounded", "bounded()", "bounded(0)", "bounded(1)", "bounded(nan)", "soft", ""}) {
    EXPECT_EQ(ReasonOf(ParseRecall(text).status()), "RECALL_INVALID") << text;
  }
  for (const std::string text : {"blockwise", "blockwise(0)", "blockwise(513)", "oneshot"}) {
    EXPECT_EQ(ReasonOf(ParsePrefill(text).status()), "PREFILL_INVALID") << text;
  }
}

}  // namespace
}  // namespace ebbtide::service
