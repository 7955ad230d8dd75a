// SPDX-License-Identifier: Apache-2.0
//
// Append: each row is copied, then its norm taken from the copy, which is still in the first-level
// cache. Squares of f32 are exact in f64, so sums there need no care about their order.

#include "gpu/kernels/append.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/append_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <bit>
#include <cmath>
#include <cstring>

#include "gpu/cpu/simd-inl.h"
#include "gpu/element.h"
#include "gpu/kernels/norm.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

template <class T>
HWY_INLINE double SumOfSquares(const std::byte* row, int head_dim) {
  const hn::Half<FloatTag> half;
  const hn::Rebind<double, decltype(half)> wide;
  const T* elements = reinterpret_cast<const T*>(row);
  auto low = hn::Zero(wide);
  auto high = hn::Zero(wide);
  const auto add = [&](Floats x) HWY_ATTR {
    const auto x_low = hn::PromoteTo(wide, hn::LowerHalf(half, x));
    const auto x_high = hn::PromoteTo(wide, hn::UpperHalf(half, x));
    low = hn::MulAdd(x_low, x_low, low);
    high = hn::MulAdd(x_high, x_high, high);
  };
  int d = 0;
  for (; d + kLanes <= head_dim; d += kLanes) add(Widen(elements + d));
  if (d < head_dim) add(WidenTail(elements + d, head_dim - d));
  return hn::GetLane(hn::SumOfLanes(wide, hn::Add(low, high)));
}

template <class T>
HWY_INLINE void AppendRows(const AppendArgs& args) {
  const size_t row_bytes = static_cast<size_t>(args.head_dim) * sizeof(T);
  for (size_t token = 0; token < static_cast<size_t>(args.tokens); ++token) {
    std::byte* const key = args.key_slot[token];
    std::byte* const value = args.value_slot[token];
    std::memcpy(key, args.key + token * args.stride, row_bytes);
    std::memcpy(value, args.value + token * args.stride, row_bytes);
    args.key_norm[token] = NormFromSquares(SumOfSquares<T>(key, args.head_dim));
    args.value_norm[token] = NormFromSquares(SumOfSquares<T>(value, args.head_dim));
  }
}

void AppendTarget(const AppendArgs& args) {
  WithElement(args.dtype, [&](auto element) { AppendRows<decltype(element)>(args); });
}

// How many elements from the start are known to be small enough: all, or those before the first
// group of vectors that holds one that is not. Signs apart, floats compare as unsigned numbers.
template <class T>
HWY_INLINE size_t SmallPrefix(const std::byte* elements, size_t count, T limit) {
  const hn::ScalableTag<T> d;
  constexpr size_t kGroup = 8;
  const size_t lanes = hn::Lanes(d);
  const auto magnitude = hn::Set(d, static_cast<T>(~T{0} >> 1));
  size_t i = 0;
  for (; i + kGroup * lanes <= count; i += kGroup * lanes) {
    auto largest = hn::Zero(d);
    for (size_t v = 0; v < kGroup; ++v) {
      const auto* from = reinterpret_cast<const T*>(elements + (i + v * lanes) * sizeof(T));
      largest = hn::Max(largest, hn::And(hn::LoadU(d, from), magnitude));
    }
    if (!hn::AllTrue(d, hn::Lt(largest, hn::Set(d, limit)))) return i;
  }
  return i;
}

size_t SmallPrefixTarget(Dtype dtype, const std::byte* elements, size_t count) {
  constexpr auto kTooLarge = std::bit_cast<uint32_t>(kMagnitudeMax) + 1;
  switch (dtype) {
    case Dtype::kF32:
      return SmallPrefix<uint32_t>(elements, count, kTooLarge);
    case Dtype::kF16:
      return SmallPrefix<uint16_t>(elements, count, 0x7C00U);  // All but infinities and NaNs.
    case Dtype::kBF16:
      return SmallPrefix<uint16_t>(elements, count, (kTooLarge >> 16) + 1);
  }
  return 0;
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {

HWY_EXPORT(AppendTarget);
HWY_EXPORT(SmallPrefixTarget);

void AppendCpu(const AppendArgs& args) {
  CheckAppend(args);
  HWY_DYNAMIC_DISPATCH(AppendTarget)(args);
}

ptrdiff_t FindTooLarge(Dtype dtype, std::span<const std::byte> elements) {
  const size_t count = elements.size() / DtypeBytes(dtype);
  const size_t small = HWY_DYNAMIC_DISPATCH(SmallPrefixTarget)(dtype, elements.data(), count);
  for (size_t i = small; i < count; ++i) {  // The rest of one group, or the tail.
    const auto element = ElementAt(dtype, elements.data() + i * DtypeBytes(dtype), 0);
    if (!(std::fabs(element) <= kMagnitudeMax)) return static_cast<ptrdiff_t>(i);
  }
  return -1;
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
