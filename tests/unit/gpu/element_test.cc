// SPDX-License-Identifier: Apache-2.0
//
// Conversions between f16 or bf16 and f32, over every one of them.

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

// From the definition: sign, exponent, fraction.
double MeaningOfBfloat16(uint16_t bits) {
  const int exponent = (bits >> 7) & 0xFF;
  const int fraction = bits & 0x7F;
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  if (exponent == 0) return sign * std::ldexp(fraction, -133);
  return sign * std::ldexp(128 + fraction, exponent - 134);
}

TEST(ElementTest, EveryBfloat16MeansItsNumberAndComesBackFromFloat) {
  for (uint32_t all = 0; all <= 0xFFFF; ++all) {
    const auto bits = static_cast<uint16_t>(all);
    const float value = Bfloat16ToFloat(bits);
    if (std::isnan(value)) {
      EXPECT_TRUE((bits & 0x7F80) == 0x7F80 && (bits & 0x7F) != 0) << all;
      EXPECT_TRUE(std::isnan(Bfloat16ToFloat(FloatToBfloat16(value)))) << all;
      continue;
    }
    if (std::isfinite(value)) {
      EXPECT_EQ(value, MeaningOfBfloat16(bits)) << all;
    }
    EXPECT_EQ(FloatToBfloat16(value), bits) << all;
  }
}

TEST(ElementTest, BetweenTwoBfloat16TheNearerIsTakenAndTheEvenOneOfATie) {
  for (uint32_t bits = 0; bits < 0x7F7F; ++bits) {  // All but the largest finite.
    const auto low = static_cast<uint16_t>(bits);
    const auto high = static_cast<uint16_t>(bits + 1);
    const float middle = std::bit_cast<float>((bits << 16) + 0x8000U);
    EXPECT_EQ(FloatToBfloat16(middle), (bits & 1) == 0 ? low : high) << bits;
    EXPECT_EQ(FloatToBfloat16(std::nextafter(middle, 0.0F)), low) << bits;
    EXPECT_EQ(FloatToBfloat16(std::nextafter(middle, INFINITY)), high) << bits;
  }
  EXPECT_EQ(FloatToBfloat16(std::numeric_limits<float>::max()), 0x7F80);
  EXPECT_EQ(FloatToBfloat16(-1.0F), 0xBF80);
  // A NaN whose upper half alone would be infinite.
  EXPECT_TRUE(std::isnan(Bfloat16ToFloat(FloatToBfloat16(std::bit_cast<float>(0x7F800001U)))));
}

TEST(ElementTest, ElementsAreStoredAndReadAtAnyAddress) {
  for (const Dtype dtype : kDtypes) {
    std::byte row[13] = {};

    StoreElement(dtype, row + 1, 1, -2.5F);

    EXPECT_EQ(ElementAt(dtype, row + 1, 0), 0);
    EXPECT_EQ(ElementAt(dtype, row + 1, 1), -2.5F);
    EXPECT_EQ(ElementAt(dtype, row + 1, 2), 0);
  }
}

}  // namespace
}  // namespace ebbtide::gpu
