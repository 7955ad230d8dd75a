// SPDX-License-Identifier: Apache-2.0
//
// Every f16 is visited: each must round to itself, and each gap between neighbours to the end asked
// for.

#include "gpu/outward.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "gtest/gtest.h"

#include "gpu/element.h"

namespace ebbtide::gpu {
namespace {

TEST(OutwardTest, EveryHalfRoundsToItself) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    if ((half & 0x7FFFU) >= kHalfInfinity) continue;
    const double value = HalfToFloat(half);

    EXPECT_EQ(HalfDown(value), half);
    EXPECT_EQ(HalfUp(value), half);
    EXPECT_EQ(HalfNearest(value), half);
  }
}

TEST(OutwardTest, BetweenNeighboursEachRoundingTakesItsEnd) {
  for (uint16_t half = 0; half < kHalfMax; ++half) {
    const auto next = static_cast<uint16_t>(half + 1);
    const double low = HalfToFloat(half);
    const double high = HalfToFloat(next);
    const double middle = (low + high) / 2;
    for (const double value : {std::nextafter(low, high), middle, std::nextafter(high, low)}) {
      EXPECT_EQ(HalfDown(value), half);
      EXPECT_EQ(HalfUp(value), next);
      EXPECT_EQ(HalfDown(-value), next | 0x8000);
      EXPECT_EQ(HalfUp(-value), half | 0x8000);
    }
    EXPECT_EQ(HalfNearest(std::nextafter(middle, low)), half);
    EXPECT_EQ(HalfNearest(std::nextafter(middle, high)), next);
    EXPECT_EQ(HalfNearest(middle), half % 2 == 0 ? half : next);
  }
}

TEST(OutwardTest, BeyondTheLargestHalfOnlyTheOutwardRoundingIsInfinite) {
  for (const double value : {65505.0, 65520.0, 1e6, 1e300}) {
    EXPECT_EQ(HalfDown(value), kHalfMax);
    EXPECT_EQ(HalfUp(value), kHalfInfinity);
    EXPECT_EQ(HalfNearest(value), kHalfMax);
    EXPECT_EQ(HalfDown(-value), kHalfInfinity | 0x8000);
    EXPECT_EQ(HalfUp(-value), kHalfMax | 0x8000);
  }
}

TEST(OutwardTest, FloatsRoundOutward) {
  const double third = 1.0 / 3.0;

  EXPECT_LT(FloatDown(third), third);
  EXPECT_GT(FloatUp(third), third);
  EXPECT_EQ(std::nextafter(FloatDown(third), 1.0F), FloatUp(third));
  EXPECT_EQ(FloatDown(0.5), 0.5F);
  EXPECT_EQ(FloatUp(-0.5), -0.5F);
  EXPECT_EQ(FloatUp(1e300), std::numeric_limits<float>::infinity());
  EXPECT_EQ(FloatDown(1e300), std::numeric_limits<float>::max());
}

}  // namespace
}  // namespace ebbtide::gpu
