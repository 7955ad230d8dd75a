// SPDX-License-Identifier: Apache-2.0
//
// Sizes of what kernels work on: element types, and how many bytes a run of tokens takes. Bytes of
// keys and values are computed here and nowhere else.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ebbtide::gpu {

enum class Dtype : uint8_t { kF32 = 1, kF16 = 2, kBF16 = 3 };
inline constexpr std::array kDtypes = {Dtype::kF32, Dtype::kF16, Dtype::kBF16};

inline constexpr int kHeadDimMax = 256;
inline constexpr int kGroupMax = 16;  // Query heads that share one KV head.
inline constexpr int kPageTokensMax = 64;

constexpr size_t DtypeBytes(Dtype dtype) {
  return dtype == Dtype::kF32 ? 4 : 2;
}
constexpr std::string_view DtypeName(Dtype dtype) {
  return dtype == Dtype::kF32 ? "f32" : dtype == Dtype::kF16 ? "f16" : "bf16";
}

// Of one key or value.
constexpr size_t RowBytes(Dtype dtype, int head_dim) {
  return static_cast<size_t>(head_dim) * DtypeBytes(dtype);
}

// A page, or a frame of the device pool: `tokens` keys, then as many values.
struct PageShape {
  int tokens = 32;
  int head_dim = 0;
  Dtype dtype = Dtype::kF16;

  constexpr size_t row_bytes() const { return RowBytes(dtype, head_dim); }
  constexpr size_t half_bytes() const { return static_cast<size_t>(tokens) * row_bytes(); }
  constexpr size_t page_bytes() const { return 2 * half_bytes(); }
  friend bool operator==(const PageShape&, const PageShape&) = default;
};

}  // namespace ebbtide::gpu
