// SPDX-License-Identifier: Apache-2.0
//
// Directed rounding by cutting the f64 towards zero and stepping outward where something was cut.

#include "gpu/outward.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace ebbtide::gpu {
namespace {

struct Cut {
  uint16_t half = 0;  // Without sign: the largest f16 <= |value|.
  bool is_exact = false;
  double rest = 0;  // What was cut, in steps of the last place: 0 <= rest < 1.
};

double PowerOfTwo(int exponent) {  // Not of subnormals.
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

Cut CutTowardsZero(double magnitude) {
  if (magnitude > 65504.0) return {.half = kHalfMax};
  // f16 has 10 bits after the leading one, and steps of 2^-24 below 2^-14.
  const int exponent =
      std::max(-14, static_cast<int>(std::bit_cast<uint64_t>(magnitude) >> 52) - 1023);
  const double steps = magnitude * PowerOfTwo(10 - exponent);  // Exact, < 2048.
  const auto whole = static_cast<uint32_t>(steps);
  const uint32_t biased = static_cast<uint32_t>(exponent + 14) << 10;
  return {.half = static_cast<uint16_t>(biased + whole),
          .is_exact = steps == whole,
          .rest = steps - whole};
}

uint16_t Towards(double value, bool is_away_from_zero) {
  const Cut cut = CutTowardsZero(std::fabs(value));
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000U : 0U);
  const auto step = static_cast<uint16_t>(is_away_from_zero && !cut.is_exact ? 1U : 0U);
  return static_cast<uint16_t>(sign | (cut.half + step));  // The step past 65504 is infinity.
}

}  // namespace

uint16_t HalfDown(double value) {
  return Towards(value, std::signbit(value));
}
uint16_t HalfUp(double value) {
  return Towards(value, !std::signbit(value));
}

uint16_t HalfNearest(double value) {
  const Cut cut = CutTowardsZero(std::fabs(value));
  const bool is_up =
      cut.half != kHalfMax && (cut.rest > 0.5 || (cut.rest == 0.5 && (cut.half & 1U) != 0));
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000U : 0U);
  return static_cast<uint16_t>(sign | (cut.half + (is_up ? 1U : 0U)));
}

float FloatDown(double value) {
  const auto nearest = static_cast<float>(value);
  return nearest > value ? std::nextafter(nearest, -std::numeric_limits<float>::infinity())
                         : nearest;
}

float FloatUp(double value) {
  return -FloatDown(-value);
}

}  // namespace ebbtide::gpu
