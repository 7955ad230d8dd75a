// SPDX-License-Identifier: Apache-2.0
//
// What the SIMD kernels share: vectors of f32 made of keys and values, sums across lanes, and the
// exponential. Compiled once for each target; include it after <hwy/foreach_target.h>, inside no
// namespace. Tested through every kernel; the exponential by tests/unit/gpu/mass_test.cc.

#if defined(EBBTIDE_GPU_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EBBTIDE_GPU_CPU_SIMD_INL_H_
#undef EBBTIDE_GPU_CPU_SIMD_INL_H_
#else
#define EBBTIDE_GPU_CPU_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstring>

#include "gpu/shape.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using FloatTag = hn::CappedTag<float, 16>;
using Floats = hn::Vec<FloatTag>;
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(FloatTag()));

// kLanes elements of a key or value row, widened.
HWY_INLINE Floats Widen(const float* elements) {
  return hn::LoadU(FloatTag(), elements);
}
HWY_INLINE Floats Widen(const hwy::float16_t* elements) {
  const hn::Rebind<hwy::float16_t, FloatTag> half_tag;
  return hn::PromoteTo(FloatTag(), hn::LoadU(half_tag, elements));
}
// bf16 is the upper half of an f32.
HWY_INLINE Floats Widen(const hwy::bfloat16_t* elements) {
  const hn::RebindToUnsigned<FloatTag> word;
  const hn::Rebind<uint16_t, FloatTag> half;
  const auto bits = hn::LoadU(half, reinterpret_cast<const uint16_t*>(elements));
  return hn::BitCast(FloatTag(), hn::ShiftLeft<16>(hn::PromoteTo(word, bits)));
}

// Calls use(T()), T being what elements of `dtype` are loaded as.
template <class Use>
HWY_INLINE void WithElement(Dtype dtype, Use use) {
  switch (dtype) {
    case Dtype::kF32:
      return use(float());
    case Dtype::kF16:
      return use(hwy::float16_t());
    case Dtype::kBF16:
      return use(hwy::bfloat16_t());
  }
}

// The last `count` < kLanes elements of a row, then zeros. Nothing past the row is read.
template <class T>
HWY_INLINE Floats WidenTail(const T* elements, int count) {
  alignas(64) T padded[kLanes] = {};
  std::memcpy(padded, elements, static_cast<size_t>(count) * sizeof(T));
  return Widen(padded);
}

// Of 32-bit numbers of either kind.
template <class V>
HWY_INLINE V PairSums(V a, V b) {
  const hn::DFromV<V> d;
  return hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
}

// In each 128-bit block: the block's sums of four vectors.
template <class V>
HWY_INLINE V BlockSums(const V* vectors) {
  const hn::DFromV<V> d;
  const hn::Repartition<double, hn::DFromV<V>> pair;
  const auto low = hn::BitCast(pair, PairSums(vectors[0], vectors[1]));
  const auto high = hn::BitCast(pair, PairSums(vectors[2], vectors[3]));
  return hn::Add(hn::BitCast(d, hn::InterleaveLower(pair, low, high)),
                 hn::BitCast(d, hn::InterleaveUpper(pair, low, high)));
}

static_assert(kLanes == (HWY_CAP_GE512   ? 16
                         : HWY_CAP_GE256 ? 8
                                         : 4),
              "what follows knows vectors of these sizes");

// Lane l of the result is the sum over all lanes of vectors[l], for kLanes vectors.
#if HWY_CAP_GE512
// Neighbours at a distance of 1, 2, 4 or 8 lanes are added, a's in half of the lanes and b's in the
// others. Blends run on either vector port and shuffles on one only, which they would crowd.
template <class V>
HWY_INLINE V SumsBy2(V a, V b) {
  const hn::DFromV<V> d;
  const hn::Repartition<double, hn::DFromV<V>> pair;
  const V own = hn::BitCast(d, hn::OddEven(hn::BitCast(pair, b), hn::BitCast(pair, a)));
  return hn::Add(own, hn::CombineShiftRightBytes<8>(d, b, a));
}
template <class V>
HWY_INLINE V SumsBy8(V a, V b) {
  const hn::DFromV<V> d;
  return hn::Add(hn::ConcatUpperLower(d, b, a), hn::ConcatLowerUpper(d, b, a));
}
template <class V>
HWY_INLINE V SumsBy1(V a, V b) {
  return hn::Add(hn::OddEven(b, a), hn::Shuffle2301(hn::OddEven(a, b)));
}
template <class V>
HWY_INLINE V SumsBy4(V a, V b) {
  return hn::Add(hn::OddEvenBlocks(b, a), hn::SwapAdjacentBlocks(hn::OddEvenBlocks(a, b)));
}

// Of every other vector but one: i, i + 2, i + 8, i + 10.
template <class V>
HWY_INLINE V FourSums(const V* v) {
  return SumsBy8(SumsBy2(v[0], v[2]), SumsBy2(v[8], v[10]));
}

template <class V>
HWY_INLINE V Sums(const V* vectors) {
  return SumsBy4(SumsBy1(FourSums(vectors), FourSums(vectors + 1)),
                 SumsBy1(FourSums(vectors + 4), FourSums(vectors + 5)));
}
#elif HWY_CAP_GE256
template <class V>
HWY_INLINE V Sums(const V* vectors) {
  const hn::DFromV<V> d;
  const V low = BlockSums(vectors);
  const V high = BlockSums(vectors + 4);
  return hn::Add(hn::ConcatLowerLower(d, high, low), hn::ConcatUpperUpper(d, high, low));
}
#else
template <class V>
HWY_INLINE V Sums(const V* vectors) {
  return BlockSums(vectors);
}
#endif

// e^x for x <= 88, within 2 units in the last place; 0 below -87.3, where results would be
// subnormal, and for NaN. e^0 is exactly 1.
//
// x = n ln 2 + r with |r| <= ln 2 / 2; ln 2 in two parts, the first short enough that n times it is
// exact; polynomial of Cephes expf (Moshier). Added to 1.5 * 2^23, a number is rounded to its
// nearest integer n, which the lowest bits of the sum hold. What becomes of an x below the limit is
// dropped at the end.
HWY_INLINE Floats Exp(Floats x) {
  const FloatTag d;
  const hn::RebindToSigned<FloatTag> integer;
  const Floats shifter = hn::Set(d, 0x1.8p23F);
  const auto is_normal = hn::Ge(x, hn::Set(d, -87.3F));
  const Floats bounded = hn::Min(x, hn::Set(d, 88.0F));
  const Floats shifted = hn::MulAdd(bounded, hn::Set(d, 1.44269504088896341F), shifter);
  const Floats whole = hn::Sub(shifted, shifter);
  Floats r = hn::NegMulAdd(whole, hn::Set(d, 0.693359375F), bounded);
  r = hn::NegMulAdd(whole, hn::Set(d, -2.12194440e-4F), r);
  Floats p = hn::Set(d, 1.9875691500e-4F);
  p = hn::MulAdd(p, r, hn::Set(d, 1.3981999507e-3F));
  p = hn::MulAdd(p, r, hn::Set(d, 8.3334519073e-3F));
  p = hn::MulAdd(p, r, hn::Set(d, 4.1665795894e-2F));
  p = hn::MulAdd(p, r, hn::Set(d, 1.6666665459e-1F));
  p = hn::MulAdd(p, r, hn::Set(d, 5.0000001201e-1F));
  const Floats fraction = hn::Add(hn::MulAdd(hn::Mul(r, r), p, r), hn::Set(d, 1.0F));
  // What is above n in `shifted` falls out.
  const auto power =
      hn::Add(hn::ShiftLeft<23>(hn::BitCast(integer, shifted)), hn::Set(integer, 127 << 23));
  return hn::IfThenElseZero(is_normal, hn::Mul(fraction, hn::BitCast(d, power)));
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#endif  // EBBTIDE_GPU_CPU_SIMD_INL_H_
