// SPDX-License-Identifier: Apache-2.0
//
// Attention drawn by each slot: on every SIMD target and CUDA against the reference; and pooling.
// One logit over one row makes mass the exponential itself, so its accuracy is measured here too.

#include "gpu/kernels/mass.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/unit/gpu/each_target.h"

namespace ebbtide::gpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Rows of logits, some masked, with their log-sum-exp.
struct Rows {
  Rows(int group_in, int queries_in, int slots_in, std::mt19937_64& random)
      : group(group_in), queries(queries_in), slots(slots_in) {
    std::normal_distribution<float> normal(0, 4);
    for (int row = 0; row < group * queries; ++row) {
      double sum = 0;
      for (int s = 0; s < slots; ++s) {
        const float logit = random() % 5 == 0 ? kMinusInfinity : normal(random);
        logits.push_back(logit);
        sum += std::exp(static_cast<double>(logit));
      }
      lse.push_back(static_cast<float>(std::log(sum)));  // -inf where all are masked.
    }
  }
  MassArgs Into(std::vector<double>& mass) const {
    return {.group = group,
            .queries = queries,
            .slots = slots,
            .logits = logits,
            .lse = lse,
            .mass = mass};
  }

  int group;
  int queries;
  int slots;
  std::vector<float> logits;
  std::vector<float> lse;
};

TEST(MassReferenceTest, AddsTheMeanOverTheGroupOfSumsOverQueries) {
  std::vector<double> mass = {10, 20};
  const std::vector<float> lse = {0, 0, 0, kMinusInfinity};  // [group 2, queries 2]
  const std::vector<float> logits = {
      0, kMinusInfinity, std::log(0.5F), std::log(0.5F), std::log(0.25F),
      0, kMinusInfinity, kMinusInfinity};

  MassReference({.group = 2, .queries = 2, .slots = 2, .logits = logits, .lse = lse, .mass = mass});

  EXPECT_NEAR(mass[0], 10 + (1 + 0.5 + 0.25) / 2, 1e-7);
  EXPECT_NEAR(mass[1], 20 + (0.5 + 1) / 2, 1e-7);
}

class MassOnTarget : public OnTarget {
 protected:
  void Mass(const MassArgs& args) const { Choose(&MassCpu, &MassOnCuda)(args); }
};
INSTANTIATE_TEST_SUITE_P(EveryTarget, MassOnTarget, EveryTargetAndCuda(), TargetName);

TEST_P(MassOnTarget, AgreesWithReference) {
  test::ForEachSeed(10, [this](uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto between = [&](int least, int most) {
      return std::uniform_int_distribution<int>(least, most)(random);
    };
    const Rows rows(between(1, 16), between(0, 9), between(0, 1500), random);
    std::vector<double> expected(static_cast<size_t>(rows.slots), 0.125);
    std::vector<double> mass = expected;

    MassReference(rows.Into(expected));
    Mass(rows.Into(mass));

    for (size_t s = 0; s < mass.size(); ++s) {
      // z - lse is rounded: of numbers up to 64, by 2^-19, and so is the weight; then the sums are.
      ASSERT_NEAR(mass[s], expected[s], 0x1p-18 * (expected[s] - 0.125) + 0x1p-50 * expected[s])
          << s;
    }
  });
}

TEST_P(MassOnTarget, SumOfThousandStillFeelsWeightsOfOneHundredThousandth) {
  std::vector<double> mass = {1000};
  const std::vector<float> logits = {std::log(1e-5F)};
  const std::vector<float> lse = {0};

  for (int step = 0; step < 1000; ++step) {
    Mass({.slots = 1, .logits = logits, .lse = lse, .mass = mass});
  }

  EXPECT_NEAR(mass[0], 1000 + 1000 * 1e-5, 1e-7);
}

TEST_P(MassOnTarget, ExponentialIsWithinThreeRoundings) {
  // Every 97th f32 from -87.3 to 0, and a few above. Emulated, each takes its time.
  const uint32_t step = GetParam() == "cuda" ? 4'999 : 97;
  std::vector<float> logits;
  for (uint32_t bits = 0x80000000U; bits <= std::bit_cast<uint32_t>(-87.3F); bits += step) {
    if (bits > 0x80000000U && bits < 0x30000000U + 0x80000000U) bits = 0x30000000U + 0x80000000U;
    logits.push_back(std::bit_cast<float>(bits));
  }
  for (float x = 0; x < 2; x += 1e-4F) logits.push_back(x);
  std::vector<double> mass(logits.size(), 0.0);
  const std::vector<float> lse = {0};

  Mass({.slots = static_cast<int>(logits.size()), .logits = logits, .lse = lse, .mass = mass});

  double worst = 0;
  for (size_t s = 0; s < logits.size(); ++s) {
    const double exact = std::exp(static_cast<double>(logits[s]));
    ASSERT_FALSE(std::isnan(mass[s])) << "of logit " << logits[s];
    worst = std::max(worst, std::fabs(mass[s] - exact) / exact);
  }
  RecordProperty("worst_in_units_of_2^-24", std::to_string(worst * 0x1p24));
  EXPECT_LE(worst, 3 * 0x1p-24);  // AttendSumError counts on it.
}

TEST_P(MassOnTarget, ExponentialOfZeroIsOneAndOfMinusInfinityNothing) {
  std::vector<double> mass(5, 0.0);
  const std::vector<float> logits = {0, kMinusInfinity, -87.4F, -1e30F,
                                     -std::numeric_limits<float>::max()};
  const std::vector<float> lse = {0};

  Mass({.slots = 5, .logits = logits, .lse = lse, .mass = mass});

  EXPECT_EQ(mass, (std::vector<double>{1, 0, 0, 0, 0}));
}

struct Pooling {
  const char* name;
  void (*largest)(const PoolArgs&);
  void (*average)(const PoolArgs&);
};

class PoolTest : public testing::TestWithParam<Pooling> {
 protected:
  void SetUp() override {
    if (GetParam().largest == &MaxPoolOnCuda && !WhyNoCuda().empty()) {
      GTEST_SKIP() << "not run: " << WhyNoCuda();
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Every, PoolTest,
                         testing::Values(Pooling{"cpu", &MaxPool, &AveragePool},
                                         Pooling{"cuda", &MaxPoolOnCuda, &AveragePoolOnCuda}),
                         [](const auto& test) { return test.param.name; });

TEST_P(PoolTest, LargestWithinTheWindow) {
  const std::vector<float> mass = {5, 1, 2, 0, 3, 4};
  std::vector<float> pooled(6);

  GetParam().largest({.kernel = 3, .mass = mass, .pooled = pooled});
  EXPECT_EQ(pooled, (std::vector<float>{5, 5, 2, 3, 4, 4}));

  GetParam().largest({.kernel = 1, .mass = mass, .pooled = pooled});
  EXPECT_EQ(pooled, mass);

  GetParam().largest({.kernel = 99, .mass = mass, .pooled = pooled});
  EXPECT_EQ(pooled, std::vector<float>(6, 5));
}

TEST_P(PoolTest, AverageDividesByTheWholeWindowAtTheEndsToo) {
  const std::vector<float> mass = {3, 6, 9, 0};
  std::vector<float> pooled(4);

  GetParam().average({.kernel = 3, .mass = mass, .pooled = pooled});

  EXPECT_EQ(pooled, (std::vector<float>{3, 6, 5, 3}));
}

TEST_P(PoolTest, NothingPoolsToNothing) {
  GetParam().largest({.kernel = 5, .mass = {}, .pooled = {}});
  GetParam().average({.kernel = 5, .mass = {}, .pooled = {}});
}

TEST_P(PoolTest, EvenWindowStopsTheProcess) {
  EXPECT_DEATH(GetParam().largest({.kernel = 4, .mass = {}, .pooled = {}}), "kernel is odd");
}

}  // namespace
}  // namespace ebbtide::gpu
