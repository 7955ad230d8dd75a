// SPDX-License-Identifier: Apache-2.0
//
// Prompts of one token and more, shorter than sinks, window and page and just around them, and the
// first steps after: everything is resident, and answers are full attention's.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/engine_stand.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::service {
namespace {

using test::EngineStand;
using test::Errors;
using test::ErrorsOf;
using test::Tokens;
using test::Worker;

// Four sinks, pages of 16, windows of 32 queries.
constexpr int32_t kPrompts[] = {1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33};
constexpr int32_t kSteps = 3;

class ShortSequenceTest : public testing::TestWithParam<const char*> {
 protected:
  void ExpectFull(const StepAnswer& answer, int layer, int32_t index, int32_t count) {
    ASSERT_OK(answer.status);
    const Errors errors = ErrorsOf(answer, tokens_, layer, index, count);
    EXPECT_LT(errors.relative, 1e-5) << index;
    EXPECT_EQ(errors.violations, 0) << index;
    EXPECT_EQ(std::ranges::count(answer.certificate.met, 1), count) << index;
  }

  // Head 0 of layer 0.
  std::vector<std::byte> KeysOf(const std::string& sequence) {
    const auto pages = stand_.engine().ReadPages({.sequence = sequence});
    EXPECT_OK(pages.status());
    std::vector<std::byte> keys;
    for (const PageBytes& page : *pages) keys.insert(keys.end(), page.k.begin(), page.k.end());
    return keys;
  }
  std::vector<std::byte> KeysSent(int32_t tokens) const {
    const std::vector<std::byte> all = tokens_.Keys(0, 0, tokens);
    const auto row = static_cast<ptrdiff_t>(tokens_.geometry.page_shape().row_bytes());
    std::vector<std::byte> keys;
    for (auto at = all.begin(); at != all.end(); at += row * tokens_.geometry.kv_heads) {
      keys.insert(keys.end(), at, at + row);
    }
    return keys;
  }

  const Tokens tokens_{.geometry = test::SmallGeometry()};
  EngineStand stand_;
};

TEST_P(ShortSequenceTest, IsAnsweredInFullAndReadBackWhole) {
  for (const int32_t prompt : kPrompts) {
    SCOPED_TRACE(prompt);
    const std::string name = "of " + std::to_string(prompt);
    Worker worker(stand_.engine(), tokens_, name);
    worker.open = {.policy = GetParam(), .recall = "bounded(0.02)", .budget_tokens = 64};
    ASSERT_OK(worker.Open().status());
    for (int layer = 0; layer < tokens_.geometry.layers; ++layer) {
      const StepAnswer answer =
          worker.Step({.layer = layer, .count = prompt, .phase = Phase::kPrefill});
      ExpectFull(answer, layer, prompt - 1, prompt);
    }
    for (int32_t index = prompt; index < prompt + kSteps; ++index) {
      for (int layer = 0; layer < tokens_.geometry.layers; ++layer) {
        const StepAnswer answer = worker.Step({.layer = layer, .first = index});
        ExpectFull(answer, layer, index, 1);
        EXPECT_EQ(answer.absent_pages, 0U);
      }
    }
    stand_.engine().CheckInvariants();

    EXPECT_EQ(KeysOf(name), KeysSent(prompt + kSteps));
  }
}

TEST_P(ShortSequenceTest, GrowsTokenByTokenFromTheFirstPastItsBudget) {
  Worker worker(stand_.engine(), tokens_, "a");
  worker.open = {.policy = GetParam(), .recall = "exact", .budget_tokens = 48, .chunk_tokens = 1};
  ASSERT_OK(worker.Open().status());
  uint64_t absent = 0;
  for (int32_t index = 0; index < 100; ++index) {
    for (int layer = 0; layer < tokens_.geometry.layers; ++layer) {
      const StepAnswer answer = worker.Step({.layer = layer, .first = index});
      ExpectFull(answer, layer, index, 1);
      absent = answer.absent_pages;
    }
    stand_.engine().CheckInvariants();
  }
  EXPECT_GT(absent, 0U);
  EXPECT_EQ(KeysOf("a"), KeysSent(100));
}

INSTANTIATE_TEST_SUITE_P(Policies, ShortSequenceTest,
                         testing::Values("streaming", "keydiff", "h2o", "tova", "snapkv",
                                         "h2o+caote", "tova+fastcaote", "snapkv+caote"),
                         [](const auto& test) {
                           std::string name = test.param;
                           std::ranges::replace(name, '+', '_');
                           return name;
                         });

}  // namespace
}  // namespace ebbtide::service
