// SPDX-License-Identifier: Apache-2.0
//
// A page's digest in two passes: down the channels for boxes, means and norms, then along the
// values for the radius, out of the first-level cache. Sums of means are f64 but for pairs of
// tokens, which are added in f32; norms and radii are f32, widened by what that may have lost.

#include "gpu/kernels/digest.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/digest_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

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
using Half = hwy::float16_t;
using HalfTag = hn::Rebind<Half, FloatTag>;

// How kLanes channels are read: a whole vector of them, or the last few.
template <class T>
struct Whole {
  HWY_INLINE Floats operator()(const T* row) const { return Widen(row); }
};
template <class T>
struct Last {
  int count;
  HWY_INLINE Floats operator()(const T* row) const { return WidenTail(row, count); }
};

// Keys or values of one page.
template <class T>
struct Rows {
  const T* first;
  int tokens;
  int dim;
};

// kLanes numbers in f64.
struct Wide {
  Doubles low;
  Doubles high;
};

HWY_INLINE Wide Promote(Floats x) {
  const DoubleTag wide;
  const hn::Half<FloatTag> half;
  return {hn::PromoteTo(wide, hn::LowerHalf(half, x)), hn::PromoteTo(wide, hn::UpperHalf(half, x))};
}

HWY_INLINE Floats Demote(Wide x) {
  const hn::Half<FloatTag> half;
  return hn::Combine(FloatTag(), hn::DemoteTo(half, x.high), hn::DemoteTo(half, x.low));
}

HWY_INLINE void Add(Floats x, Wide& sum) {
  const Wide term = Promote(x);
  sum = {hn::Add(sum.low, term.low), hn::Add(sum.high, term.high)};
}

// What one pass down kLanes channels finds.
struct Channels {
  Floats least;
  Floats most;
  Wide sum;
};

// Two tokens at a time, of kLanes channels from d on; least and most only where `kHasBox`. Adds
// each token's squares to square[token].
template <bool kHasBox, class T, class WidenRow>
HWY_INLINE Channels PassDown(const Rows<T>& rows, int d, WidenRow widen, Floats* square) {
  const DoubleTag wide;
  const T* row = rows.first + d;
  Channels channels{widen(row), widen(row), {hn::Zero(wide), hn::Zero(wide)}};
  int j = 0;
  for (; j + 2 <= rows.tokens; j += 2, row += 2 * rows.dim) {
    const Floats x = widen(row);
    const Floats y = widen(row + rows.dim);
    if constexpr (kHasBox) {
      channels.least = hn::Min(channels.least, hn::Min(x, y));
      channels.most = hn::Max(channels.most, hn::Max(x, y));
    }
    square[j] = hn::MulAdd(x, x, square[j]);
    square[j + 1] = hn::MulAdd(y, y, square[j + 1]);
    Add(hn::Add(x, y), channels.sum);
  }
  if (j < rows.tokens) {
    const Floats x = widen(row);
    channels.least = hn::Min(channels.least, x);
    channels.most = hn::Max(channels.most, x);
    square[j] = hn::MulAdd(x, x, square[j]);
    Add(x, channels.sum);
  }
  return channels;
}

// The mean, stored to the nearest f16 that is finite. Adds to `error` the squares of what storing
// it changed.
HWY_INLINE void StoreMean(const Channels& channels, double share, Half* stored, Wide& error) {
  const DoubleTag wide;
  const FloatTag f;
  const Doubles scale = hn::Set(wide, share);
  const Wide mean{hn::Mul(channels.sum.low, scale), hn::Mul(channels.sum.high, scale)};
  const Floats finite = hn::Max(hn::Min(Demote(mean), hn::Set(f, 65504.0F)), hn::Set(f, -65504.0F));
  hn::StoreU(hn::DemoteTo(HalfTag(), finite), HalfTag(), stored);

  const Wide back = Promote(Widen(stored));
  const Wide off{hn::Sub(mean.low, back.low), hn::Sub(mean.high, back.high)};
  error = {hn::MulAdd(off.low, off.low, error.low), hn::MulAdd(off.high, off.high, error.high)};
}

// The box, rounded outward.
template <class T>
HWY_INLINE void StoreBox(const Channels& channels, Half* low, Half* high) {
  if constexpr (!std::is_same_v<T, Half>) {
    const FloatTag f;
    alignas(64) float least[kLanes];
    alignas(64) float most[kLanes];
    hn::Store(channels.least, f, least);
    hn::Store(channels.most, f, most);
    for (int l = 0; l < kLanes; ++l) {
      low[l].bits = HalfDown(least[l]);
      high[l].bits = HalfUp(most[l]);
    }
  } else {  // They are among the f16 that came in: nothing is rounded.
    hn::StoreU(hn::DemoteTo(HalfTag(), channels.least), HalfTag(), low);
    hn::StoreU(hn::DemoteTo(HalfTag(), channels.most), HalfTag(), high);
  }
}

// At least the root of the largest of the tokens' sums, at most 5e-6 more; infinite where squares
// overflow. A sum in f32 of n squares, each of a rounded difference, is off by n + 2 roundings.
HWY_INLINE float LargestNorm(const Floats* square, int tokens, int dim) {
  const FloatTag f;
  Floats most = hn::Zero(f);
  for (int j = 0; j < tokens; j += kLanes) most = hn::Max(most, Sums(square + j));
  const double largest = hn::GetLane(hn::MaxOfLanes(f, most));
  const double roundings = (dim + kLanes - 1) / kLanes + 4 + 2;
  constexpr double kUnderflow = 1e-20;  // Squares below the normal range lose at most 2^-150 each.
  return FloatUp(std::sqrt(largest * (1 + roundings * 0x1p-24)) * (1 + 1e-12) + kUnderflow);
}

template <class T>
class DigestKernel {
 public:
  explicit DigestKernel(const DigestArgs& args)
      : args_(args),
        dim_(args.shape.head_dim),
        key_{reinterpret_cast<const T*>(args.page.data()), args.tokens, dim_},
        value_{key_.first + static_cast<ptrdiff_t>(args.shape.tokens) * dim_, args.tokens, dim_} {}

  HWY_INLINE void Run() {
    const DoubleTag wide;
    Wide key_error{hn::Zero(wide), hn::Zero(wide)};
    Wide value_error = key_error;  // Not kept: the radius is measured from the stored mean.
    PrefetchPage();
    ClearSquares();
    for (int d = 0; d < dim_; d += kLanes) {
      const Channels channels = Down<true>(key_, d);
      StoreBox<T>(channels, part_[0] + d, part_[1] + d);
      StoreMean(channels, 1.0 / args_.tokens, part_[2] + d, key_error);
    }
    tail_.key_norm_max = LargestNorm(square_, args_.tokens, dim_);
    ClearSquares();
    for (int d = 0; d < dim_; d += kLanes) {
      StoreMean(Down<false>(value_, d), 1.0 / args_.tokens, part_[3] + d, value_error);
    }
    tail_.value_norm_max = LargestNorm(square_, args_.tokens, dim_);
    MeasureRadius();
    tail_.value_radius = LargestNorm(square_, args_.tokens, dim_);

    const double squares =
        hn::GetLane(hn::SumOfLanes(wide, hn::Add(key_error.low, key_error.high)));
    // The mean's own rounding: pairs are added in f32, each to 2^-24 of at most two norms.
    tail_.key_mean_error = FloatUp(std::sqrt(squares) * (1 + 1e-12) +
                                   0x1.01p-24 * static_cast<double>(tail_.key_norm_max));
    tail_.tokens = args_.tokens;
    const bool overflows = !std::isfinite(tail_.value_radius + tail_.value_norm_max) ||
                           !std::isfinite(tail_.key_norm_max + tail_.key_mean_error);
    overflows ? DigestReference(args_) : Write();
  }

 private:
  // Passing down a cold page would wait for every row in turn.
  HWY_INLINE void PrefetchPage() const {
    for (size_t b = 0; b < args_.page.size(); b += 64) __builtin_prefetch(&args_.page[b], 0, 2);
  }

  HWY_INLINE void ClearSquares() {
    const int padded = (args_.tokens + kLanes - 1) / kLanes * kLanes;
    for (int j = 0; j < padded; ++j) square_[j] = hn::Zero(FloatTag());
  }

  template <bool kHasBox>
  HWY_INLINE Channels Down(const Rows<T>& rows, int d) {
    return d + kLanes <= dim_ ? PassDown<kHasBox>(rows, d, Whole<T>(), square_)
                              : PassDown<kHasBox>(rows, d, Last<T>{dim_ - d}, square_);
  }

  template <class WidenRow>
  HWY_INLINE Floats SquareFromMean(const T* row, int d, WidenRow widen, Floats sum) const {
    const Floats off = hn::Sub(widen(row + d), Widen(part_[3] + d));
    return hn::MulAdd(off, off, sum);
  }

  HWY_INLINE void MeasureRadius() {
    const T* row = value_.first;
    for (int j = 0; j < value_.tokens; ++j, row += dim_) {
      Floats sum = hn::Zero(FloatTag());
      int d = 0;
      for (; d + kLanes <= dim_; d += kLanes) sum = SquareFromMean(row, d, Whole<T>(), sum);
      if (d < dim_) sum = SquareFromMean(row, d, Last<T>{dim_ - d}, sum);
      square_[j] = sum;
    }
  }

  HWY_INLINE void Write() const {
    const size_t row_bytes = static_cast<size_t>(dim_) * sizeof(Half);
    std::byte* out = args_.digest.data();
    for (const auto& row : part_) {
      std::memcpy(out, row, row_bytes);
      out += row_bytes;
    }
    std::memcpy(out, &tail_, sizeof(tail_));
  }

  const DigestArgs& args_;
  const int dim_;
  const Rows<T> key_;
  const Rows<T> value_;
  alignas(64) Half part_[4][kHeadDimMax + kLanes];  // key_low, key_high, key_mean, value_mean
  Floats square_[kPageTokensMax + kLanes];          // Of each token, still kLanes partial sums.
  DigestTail tail_ = {};
};

void DigestTarget(const DigestArgs& args) {
  WithElement(args.shape.dtype, [&](auto element) { DigestKernel<decltype(element)>(args).Run(); });
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
