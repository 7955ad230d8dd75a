// SPDX-License-Identifier: Apache-2.0
//
// A page's digest in two passes over its keys and values, the second out of the first-level cache:
// down the channels for box and means (sums in f64: exact for f16), then along the tokens for norms
// and radii (in f32, widened by what f32 may have lost).

#include "gpu/kernels/digest.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/digest_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "gpu/cpu/simd-inl.h"
#include "gpu/outward.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

using DoubleTag = hn::Repartition<double, FloatTag>;
using Doubles = hn::Vec<DoubleTag>;
using HalfTag = hn::Rebind<hwy::float16_t, FloatTag>;

constexpr int kPaddedDim = kHeadDimMax + kLanes;

// The rows of keys or of values of one page.
template <class T>
struct Rows {
  const T* first;
  int tokens;
  int dim;

  HWY_INLINE Floats At(int j, int d) const {
    const T* element = first + static_cast<ptrdiff_t>(j) * dim + d;
    return d + kLanes <= dim ? Widen(element) : WidenTail(element, dim - d);
  }
};

// kLanes numbers in f64.
struct Wide {
  Doubles low;
  Doubles high;
};

HWY_INLINE Wide ToWide(Floats x) {
  const DoubleTag wide;
  const hn::Half<FloatTag> half;
  return {hn::PromoteTo(wide, hn::LowerHalf(half, x)), hn::PromoteTo(wide, hn::UpperHalf(half, x))};
}

HWY_INLINE Floats ToFloats(Wide x) {
  const hn::Half<FloatTag> half;
  return hn::Combine(FloatTag(), hn::DemoteTo(half, x.high), hn::DemoteTo(half, x.low));
}

// Mean over the tokens of kLanes channels, stored to the nearest f16. Adds to `error` the squares
// of what storing it changed.
template <class T>
HWY_INLINE void StoreMean(const Rows<T>& rows, int d, hwy::float16_t* stored, Wide& error) {
  const DoubleTag wide;
  const FloatTag f;
  Wide sum{hn::Zero(wide), hn::Zero(wide)};
  for (int j = 0; j < rows.tokens; ++j) {
    const Wide x = ToWide(rows.At(j, d));
    sum = {hn::Add(sum.low, x.low), hn::Add(sum.high, x.high)};
  }
  const Doubles tokens = hn::Set(wide, rows.tokens);
  const Wide mean{hn::Div(sum.low, tokens), hn::Div(sum.high, tokens)};
  const Floats finite =
      hn::Max(hn::Min(ToFloats(mean), hn::Set(f, 65504.0F)), hn::Set(f, -65504.0F));
  hn::StoreU(hn::DemoteTo(HalfTag(), finite), HalfTag(), stored + d);

  const Wide back = ToWide(Widen(stored + d));
  const Wide off{hn::Sub(mean.low, back.low), hn::Sub(mean.high, back.high)};
  error = {hn::MulAdd(off.low, off.low, error.low), hn::MulAdd(off.high, off.high, error.high)};
}

// Smallest and largest of kLanes channels, rounded outward.
template <class T>
HWY_INLINE void StoreBox(const Rows<T>& rows, int d, hwy::float16_t* low, hwy::float16_t* high) {
  const FloatTag f;
  Floats least = rows.At(0, d);
  Floats most = least;
  for (int j = 1; j < rows.tokens; ++j) {
    const Floats x = rows.At(j, d);
    least = hn::Min(least, x);
    most = hn::Max(most, x);
  }
  if constexpr (std::is_same_v<T, float>) {
    alignas(64) float least_lane[kLanes];
    alignas(64) float most_lane[kLanes];
    hn::Store(least, f, least_lane);
    hn::Store(most, f, most_lane);
    for (int l = 0; l < kLanes; ++l) {
      low[d + l].bits = HalfDown(least_lane[l]);
      high[d + l].bits = HalfUp(most_lane[l]);
    }
  } else {  // They are among the f16 that came in: nothing is rounded.
    hn::StoreU(hn::DemoteTo(HalfTag(), least), HalfTag(), low + d);
    hn::StoreU(hn::DemoteTo(HalfTag(), most), HalfTag(), high + d);
  }
}

// What norms and radii are measured from.
struct Origin {
  HWY_INLINE Floats From(Floats x, int /*d*/) const { return x; }
};
struct Centre {
  alignas(64) float at[kPaddedDim] = {};
  HWY_INLINE Floats From(Floats x, int d) const { return hn::Sub(x, hn::Load(FloatTag(), at + d)); }
};

// At least the largest distance of a row from `centre`, at most 5e-6 more, or infinite where
// squares overflow. A sum in f32 of n squares, each of a rounded difference, is off by n + 2
// roundings.
template <class T, class Point>
float Farthest(const Rows<T>& rows, const Point& centre) {
  const FloatTag f;
  Floats most = hn::Zero(f);
  for (int first = 0; first < rows.tokens; first += kLanes) {
    Floats sums[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      sums[l] = hn::Zero(f);
      if (first + l >= rows.tokens) continue;
      for (int d = 0; d < rows.dim; d += kLanes) {
        const Floats off = centre.From(rows.At(first + l, d), d);
        sums[l] = hn::MulAdd(off, off, sums[l]);
      }
    }
    most = hn::Max(most, Sums(sums));
  }
  alignas(64) float lane[kLanes];
  hn::Store(most, f, lane);
  const double largest = *std::max_element(lane, lane + kLanes);
  const double roundings = (rows.dim + kLanes - 1) / kLanes + 4 + 2;
  constexpr double kUnderflow = 1e-20;  // Squares below the normal range lose at most 2^-150 each.
  return FloatUp(std::sqrt(largest * (1 + roundings * 0x1p-24)) * (1 + 1e-12) + kUnderflow);
}

template <class T>
void Digest(const DigestArgs& args) {
  const int dim = args.shape.head_dim;
  const auto* const page = reinterpret_cast<const T*>(args.page.data());
  const Rows<T> key{page, args.tokens, dim};
  const Rows<T> value{page + static_cast<ptrdiff_t>(args.shape.tokens) * dim, args.tokens, dim};

  alignas(64) hwy::float16_t part[4][kPaddedDim];  // key_low, key_high, key_mean, value_mean
  const DoubleTag wide;
  Wide key_error{hn::Zero(wide), hn::Zero(wide)};
  Wide value_error = key_error;  // Not kept: the radius is measured from the stored mean.
  for (int d = 0; d < dim; d += kLanes) {
    StoreBox(key, d, part[0], part[1]);
    StoreMean(key, d, part[2], key_error);
    StoreMean(value, d, part[3], value_error);
  }

  Centre mean;
  for (int d = 0; d < dim; d += kLanes) hn::Store(Widen(part[3] + d), FloatTag(), mean.at + d);
  DigestTail tail = {};
  tail.value_radius = Farthest(value, mean);
  tail.value_norm_max = Farthest(value, Origin());
  tail.key_norm_max = Farthest(key, Origin());
  const double squares = hn::GetLane(hn::SumOfLanes(wide, hn::Add(key_error.low, key_error.high)));
  // The second term is f64's own rounding, for means far smaller than what they are means of.
  tail.key_mean_error =
      FloatUp(std::sqrt(squares) * (1 + 1e-12) + 1e-12 * static_cast<double>(tail.key_norm_max));
  tail.tokens = args.tokens;
  const bool overflows = !std::isfinite(tail.value_radius + tail.value_norm_max) ||
                         !std::isfinite(tail.key_norm_max + tail.key_mean_error);
  if (overflows) return DigestReference(args);

  const size_t row_bytes = static_cast<size_t>(dim) * sizeof(hwy::float16_t);
  std::byte* out = args.digest.data();
  for (const auto& row : part) {
    std::memcpy(out, row, row_bytes);
    out += row_bytes;
  }
  std::memcpy(out, &tail, sizeof(tail));
}

void DigestTarget(const DigestArgs& args) {
  args.shape.dtype == Dtype::kF32 ? Digest<float>(args) : Digest<hwy::float16_t>(args);
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {

HWY_EXPORT(DigestTarget);

void DigestCpu(const DigestArgs& args) {
  CheckDigest(args);
  HWY_DYNAMIC_DISPATCH(DigestTarget)(args);
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
