// SPDX-License-Identifier: Apache-2.0
//
// Conversions between f16 and f32, over every f16.

#include "gpu/element.h"

#include <bit>
#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace ebbtide::gpu {
namespace {

// From the definition: sign, exponent, fraction.
double Meaning(uint16_t half) {
  const int exponent = (half >> 10) & 0x1F;
  const int fraction = half & 0x3FF;
  const double sign = (half & 0x8000) != 0 ? -1 : 1;
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

TEST(ElementTest, EveryHalfMeansItsNumber) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = HalfToFloat(half);
    if ((half & 0x7C00) == 0x7C00) {
      EXPECT_EQ(std::isnan(value), (half & 0x3FF) != 0) << bits;
      EXPECT_EQ(std::isinf(value), (half & 0x3FF) == 0) << bits;
    } else {
      EXPECT_EQ(value, Meaning(half)) << bits;
    }
    EXPECT_EQ(std::signbit(value), (half & 0x8000) != 0) << bits;
  }
}

TEST(ElementTest, EveryHalfComesBackFromFloat) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = HalfToFloat(half);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(HalfToFloat(FloatToHalf(value)))) << bits;
    } else {
      EXPECT_EQ(FloatToHalf(value), half) << bits;
    }
  }
}

TEST(ElementTest, BetweenTwoHalvesTheNearerIsTakenAndTheEvenOneOfATie) {
  for (uint32_t bits = 0; bits < 0x7BFF; ++bits) {  // All but the largest finite.
    const auto low = static_cast<uint16_t>(bits);
    const auto high = static_cast<uint16_t>(bits + 1);
    const float middle = static_cast<float>((Meaning(low) + Meaning(high)) / 2);
    EXPECT_EQ(FloatToHalf(middle), (bits & 1) == 0 ? low : high) << bits;
    EXPECT_EQ(FloatToHalf(std::nextafter(middle, 0.0F)), low) << bits;
    EXPECT_EQ(FloatToHalf(std::nextafter(middle, 1e9F)), high) << bits;
  }
  EXPECT_EQ(FloatToHalf(65519.996F), 0x7BFF);
  EXPECT_EQ(FloatToHalf(65520.0F), 0x7C00);
  EXPECT_EQ(FloatToHalf(-1e30F), 0xFC00);
}

TEST(ElementTest, ElementsAreReadFromAnyAddress) {
  std::byte row[13] = {};
  const float value = -2.5F;
  const uint16_t half = FloatToHalf(0.75F);
  std::memcpy(row + 1 + 4, &value, sizeof(value));
  std::memcpy(row + 9 + 2, &half, sizeof(half));

  EXPECT_EQ(ElementAt(Dtype::kF32, row + 1, 1), -2.5F);
  EXPECT_EQ(ElementAt(Dtype::kF16, row + 9, 1), 0.75F);
}

}  // namespace
}  // namespace ebbtide::gpu
