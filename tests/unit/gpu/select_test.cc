// SPDX-License-Identifier: Apache-2.0
//
// Who leaves: the order of victims, which every backend shares, and each against the reference
// where ties abound.

#include "gpu/kernels/select.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/unit/gpu/on_cuda.h"

namespace ebbtide::gpu {
namespace {

using Select = std::vector<int32_t> (*)(const SelectArgs&);

class SelectTest : public testing::TestWithParam<Select> {
 protected:
  void SetUp() override {
    if (GetParam() != &SelectOnCuda) return;
    if (!WhyNoCuda().empty()) GTEST_SKIP() << "not run: " << WhyNoCuda();
    GTEST_FLAG_SET(death_test_style, "threadsafe");  // Fibers do not survive a fork under tsan.
  }
  void TearDown() override { GTEST_FLAG_SET(death_test_style, "fast"); }
};
std::string SelectName(const testing::TestParamInfo<Select>& test) {
  if (test.param == &SelectOnCuda) return "cuda";
  return test.param == &SelectCpu ? "cpu" : "reference";
}
INSTANTIATE_TEST_SUITE_P(Every, SelectTest,
                         testing::Values(&SelectReference, &SelectCpu, &SelectOnCuda), SelectName);

TEST_P(SelectTest, LowestScoresLeaveLowestFirst) {
  const std::vector<float> score = {3, -1, 2, 0, 5};
  const std::vector<int32_t> index = {10, 11, 12, 13, 14};
  const std::vector<uint8_t> eligible(5, 1);

  EXPECT_EQ(GetParam()({score, index, eligible, 3}), (std::vector<int32_t>{1, 3, 2}));
}

TEST_P(SelectTest, OfEqualScoresTheOlderLeavesFirstWhateverTheOrderOfSlots) {
  const std::vector<float> score = {1, 1, 1, 0};
  const std::vector<int32_t> index = {30, 10, 20, 40};
  const std::vector<uint8_t> eligible(4, 1);

  EXPECT_EQ(GetParam()({score, index, eligible, 3}), (std::vector<int32_t>{3, 1, 2}));
}

TEST_P(SelectTest, MinusZeroAndZeroAreTheSameScore) {
  const std::vector<float> score = {0.0F, -0.0F, 0.0F, -0.0F};
  const std::vector<int32_t> index = {0, 1, 2, 3};
  const std::vector<uint8_t> eligible(4, 1);

  EXPECT_EQ(GetParam()({score, index, eligible, 4}), (std::vector<int32_t>{0, 1, 2, 3}));
}

TEST_P(SelectTest, ProtectedTokensStayHoweverLowTheyScore) {
  const std::vector<float> score = {-9, -8, 1, 2};
  const std::vector<int32_t> index = {0, 1, 2, 3};
  const std::vector<uint8_t> eligible = {0, 0, 1, 1};

  EXPECT_EQ(GetParam()({score, index, eligible, 1}), (std::vector<int32_t>{2}));
  EXPECT_EQ(GetParam()({score, index, eligible, 9}), (std::vector<int32_t>{2, 3}));
}

TEST_P(SelectTest, NothingLeavesWhereNothingIsAskedOrThere) {
  const std::vector<float> score = {1};
  const std::vector<int32_t> index = {0};
  const std::vector<uint8_t> eligible = {1};

  EXPECT_TRUE(GetParam()({score, index, eligible, 0}).empty());
  EXPECT_TRUE(GetParam()({{}, {}, {}, 5}).empty());
}

TEST_P(SelectTest, ExtremeScoresHaveTheirPlace) {
  constexpr float kMax = std::numeric_limits<float>::max();
  constexpr float kTiny = std::numeric_limits<float>::denorm_min();
  const std::vector<float> score = {kMax, kTiny, -kMax, 0, -kTiny};
  const std::vector<int32_t> index = {0, 1, 2, 3, 4};
  const std::vector<uint8_t> eligible(5, 1);

  EXPECT_EQ(GetParam()({score, index, eligible, 5}), (std::vector<int32_t>{2, 4, 3, 1, 0}));
}

TEST_P(SelectTest, ScoreThatIsNotANumberStopsTheProcess) {
  const std::vector<float> score = {1, std::numeric_limits<float>::quiet_NaN()};
  const std::vector<int32_t> index = {0, 1};
  const std::vector<uint8_t> eligible = {1, 1};

  EXPECT_DEATH(GetParam()({score, index, eligible, 1}), "NaN");
}

TEST_P(SelectTest, GivesTheVictimsOfTheReference) {
  test::ForEachSeed(60, [](uint64_t seed) {
    std::mt19937_64 random(seed);
    const size_t tokens = random() % 3000;
    const auto levels = static_cast<int>(1 + random() % 50);  // Few: many ties.
    std::vector<float> score(tokens);
    std::vector<int32_t> index(tokens);
    std::vector<uint8_t> eligible(tokens);
    for (float& each : score) {
      each = (static_cast<float>(static_cast<int>(random() % 100) % levels) - 5) * 0.25F;
      if (random() % 20 == 0) each = -0.0F;
    }
    std::iota(index.begin(), index.end(), static_cast<int32_t>(random() % 1000));
    if (random() % 2 == 0) std::shuffle(index.begin(), index.end(), random);
    for (uint8_t& each : eligible) each = random() % 4 == 0 ? 0 : 1;
    const size_t count = random() % 4 == 0 ? 1 : random() % (tokens + 2);

    ASSERT_EQ(GetParam()({score, index, eligible, count}),
              SelectReference({score, index, eligible, count}));
  });
}

}  // namespace
}  // namespace ebbtide::gpu
