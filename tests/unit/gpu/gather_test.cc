// SPDX-License-Identifier: Apache-2.0
//
// Gather against its reference, over slots that lie in runs, alone and backwards.

#include "gpu/kernels/gather.h"

#include <algorithm>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/unit/gpu/on_cuda.h"

namespace ebbtide::gpu {
namespace {

constexpr std::byte kDirt{0xA5};

using Gather = void (*)(const GatherArgs&);

class GatherTest : public testing::TestWithParam<Gather> {
 protected:
  void SetUp() override {
    if (GetParam() == &GatherOnCuda && !WhyNoCuda().empty()) {
      GTEST_SKIP() << "not run: " << WhyNoCuda();
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Both, GatherTest, testing::Values(&GatherCpu, &GatherOnCuda),
                         [](const auto& test) {
                           return test.param == &GatherCpu ? "cpu" : "cuda";
                         });

TEST_P(GatherTest, GathersRunsAndSingleSlotsAndZeroesTheRest) {
  test::ForEachSeed(50, [](uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto between = [&](int least, int most) {
      return std::uniform_int_distribution<int>(least, most)(random);
    };
    const PageShape shape{.tokens = between(1, kPageTokensMax),
                          .head_dim = between(1, kHeadDimMax),
                          .dtype = kDtypes[random() % kDtypes.size()]};
    std::vector<std::byte> keys(100 * shape.row_bytes());
    std::vector<std::byte> values(keys.size());
    for (std::byte& byte : keys) byte = static_cast<std::byte>(random());
    for (std::byte& byte : values) byte = static_cast<std::byte>(random());
    std::vector<const std::byte*> key_slot;
    std::vector<const std::byte*> value_slot;
    size_t slot = 0;
    for (int token = 0; token < between(0, shape.tokens); ++token) {
      slot = random() % 3 == 0 ? random() % 100 : (slot + 1) % 100;
      key_slot.push_back(keys.data() + slot * shape.row_bytes());
      const size_t value_at = random() % 5 == 0 ? random() % 100 : slot;
      value_slot.push_back(values.data() + value_at * shape.row_bytes());
    }
    std::vector<std::byte> expected(shape.page_bytes(), kDirt);
    std::vector<std::byte> page = expected;

    GatherReference({shape, key_slot, value_slot, expected});
    GetParam()({shape, key_slot, value_slot, page});

    ASSERT_EQ(page, expected);
    const size_t filled = key_slot.size() * shape.row_bytes();
    for (size_t i = filled; i < shape.half_bytes(); ++i) {
      ASSERT_EQ(page[i], std::byte{0}) << i;
      ASSERT_EQ(page[shape.half_bytes() + i], std::byte{0}) << i;
    }
    for (size_t token = 0; token < key_slot.size(); ++token) {
      ASSERT_TRUE(std::equal(key_slot[token], key_slot[token] + shape.row_bytes(),
                             page.data() + token * shape.row_bytes()));
    }
  });
}

TEST_P(GatherTest, MoreSlotsThanThePageHasStopTheProcess) {
  const PageShape shape{.tokens = 1, .head_dim = 4, .dtype = Dtype::kF16};
  std::vector<std::byte> page(shape.page_bytes());
  const std::vector<const std::byte*> slots(2, page.data());

  EXPECT_DEATH(GetParam()({shape, slots, slots, page}), "at most shape.tokens");
}

}  // namespace
}  // namespace ebbtide::gpu
