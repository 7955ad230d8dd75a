// SPDX-License-Identifier: Apache-2.0
//
// Single elements of keys and values as numbers. For references, edges and tests: kernels convert
// whole vectors (gpu/cpu/simd-inl.h).
// Tested by tests/unit/gpu/element_test.cc.

#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "gpu/shape.h"

namespace ebbtide::gpu {

// Exact for every bit pattern; NaN stays NaN.
constexpr float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000U) << 16;
  const uint32_t exponent = (half >> 10) & 0x1FU;
  const uint32_t fraction = half & 0x3FFU;
  if (exponent == 0) {  // Zero or subnormal: fraction * 2^-24.
    const float magnitude = static_cast<float>(fraction) * 0x1p-24F;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  const uint32_t wide = exponent == 0x1F ? 0xFFU : exponent + (127 - 15);
  return std::bit_cast<float>(sign | (wide << 23) | (fraction << 13));
}

// Nearest half, ties to even; beyond 65504 infinite.
constexpr uint16_t FloatToHalf(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000U;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) {
    return static_cast<uint16_t>(sign | 0x7E00U);
  }
  if (magnitude >= 0x477FF000U) {  // 65520 and more round to infinity.
    return static_cast<uint16_t>(sign | 0x7C00U);
  }
  if (magnitude < 0x38800000U) {  // Below 2^-14: adding 1/2 aligns the fraction and rounds it.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000U));
  }
  const uint32_t odd = (magnitude >> 13) & 1U;
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000U + 0xFFFU + odd) >> 13));
}

// bf16 is the upper half of an f32: exact for every bit pattern.
constexpr float Bfloat16ToFloat(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Nearest bf16, ties to even; beyond its largest (3.39e38) infinite.
constexpr uint16_t FloatToBfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
    return static_cast<uint16_t>((bits >> 16) |
                                 0x40U);  // A NaN whose upper half might say infinite.
  }
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

// Element `d` of a row of keys or values; rows need no alignment.
inline float ElementAt(Dtype dtype, const std::byte* row, int d) {
  if (dtype == Dtype::kF32) {
    float value = 0;
    std::memcpy(&value, row + static_cast<ptrdiff_t>(d) * 4, sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, row + static_cast<ptrdiff_t>(d) * 2, sizeof(bits));
  return dtype == Dtype::kF16 ? HalfToFloat(bits) : Bfloat16ToFloat(bits);
}

// Rounds `value` to element `d` of a row.
inline void StoreElement(Dtype dtype, std::byte* row, int d, float value) {
  if (dtype == Dtype::kF32) {
    std::memcpy(row + static_cast<ptrdiff_t>(d) * 4, &value, sizeof(value));
    return;
  }
  const uint16_t bits = dtype == Dtype::kF16 ? FloatToHalf(value) : FloatToBfloat16(value);
  std::memcpy(row + static_cast<ptrdiff_t>(d) * 2, &bits, sizeof(bits));
}

}  // namespace ebbtide::gpu
