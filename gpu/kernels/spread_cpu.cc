// SPDX-License-Identifier: Apache-2.0
//
// Spreads with channels across the lanes: squares are added up token by token and across lanes once
// at the end. A page of values stays in the first-level cache while its rows pass over it.

#include "gpu/kernels/spread.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/spread_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "gpu/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr int kVectors = kLanes >= 8 ? 4 : 2;  // Of channels at once.

// Shares of one row, their squares, and the sum of those.
struct Shares {
  alignas(64) float share[kPageTokensMax];
  alignas(64) float square[kPageTokensMax];
  float focus;

  HWY_INLINE Shares(const float* logits, int tokens, float lse) {
    const FloatTag f;
    const int padded = (tokens + kLanes - 1) / kLanes * kLanes;
    std::copy_n(logits, tokens, share);
    std::fill(share + tokens, share + padded, kHidden);
    Floats total = hn::Zero(f);
    for (int t = 0; t < padded; t += kLanes) {
      const Floats p = Exp(hn::Sub(hn::Load(f, share + t), hn::Set(f, lse)));
      hn::Store(p, f, share + t);
      total = hn::Add(total, p);
    }
    const Floats whole = hn::SumOfLanes(f, total);
    Floats squares = hn::Zero(f);
    for (int t = 0; t < padded; t += kLanes) {
      const Floats p = hn::Div(hn::Load(f, share + t), whole);
      hn::Store(p, f, share + t);
      hn::Store(hn::Mul(p, p), f, square + t);
      squares = hn::MulAdd(p, p, squares);
    }
    focus = hn::GetLane(hn::SumOfLanes(f, squares));
  }
};

// Sums of squares, in lanes.
struct Squares {
  Floats each;
  Floats focal;
};

class RowKernel {
 public:
  HWY_INLINE RowKernel(const SpreadArgs& args, size_t row)
      : args_(args),
        dim_(args.head_dim),
        output_(&args.output[row * static_cast<size_t>(dim_)]),
        focal_(&args.focal_output[row * static_cast<size_t>(dim_)]),
        shares_(&args.logits[row * static_cast<size_t>(args.tokens)], args.tokens, args.lse[row]) {}

  HWY_INLINE Spread Run() {
    const FloatTag f;
    Squares sums{hn::Zero(f), hn::Zero(f)};
    const auto whole = [](const float* x) { return Widen(x); };
    int d = 0;
    for (; d + kVectors * kLanes <= dim_; d += kVectors * kLanes) Add<kVectors>(d, whole, sums);
    for (; d + kLanes <= dim_; d += kLanes) Add<1>(d, whole, sums);
    const int rest = dim_ - d;
    if (rest > 0)
      Add<1>(
          d, [rest](const float* x) { return WidenTail(x, rest); }, sums);
    constexpr double kAbove = 1 + 1.2e-4;  // The reference's, and f32.
    constexpr double kUnderflow = 1e-20;   // Products below the normal range lose 2^-150 each.
    const double each = hn::GetLane(hn::SumOfLanes(f, sums.each));
    const double focal = hn::GetLane(hn::SumOfLanes(f, sums.focal));
    return {.each = static_cast<float>(std::sqrt(each) * kAbove + kUnderflow),
            .focus = static_cast<float>(shares_.focus * kAbove),
            .focal = static_cast<float>(std::sqrt(focal) * kAbove + kUnderflow)};
  }

 private:
  // `C` vectors of channels from d: the focal output, then what lies around it and the output.
  template <int C, class WidenRow>
  HWY_INLINE void Add(int d, WidenRow widen, Squares& sums) const {
    const FloatTag f;
    Floats focal[C];
    for (Floats& sum : focal) sum = hn::Zero(f);
    for (int t = 0; t < args_.tokens; ++t) {
      const Floats square = hn::Set(f, shares_.square[t]);
      for (int c = 0; c < C; ++c) {
        focal[c] = hn::MulAdd(square, widen(Value(t, d) + c * kLanes), focal[c]);
      }
    }
    Floats output[C];
    Floats each_sum[C];
    Floats focal_sum[C];
    for (int c = 0; c < C; ++c) {
      focal[c] = hn::Div(focal[c], hn::Set(f, shares_.focus));
      output[c] = widen(output_ + d + c * kLanes);
      each_sum[c] = focal_sum[c] = hn::Zero(f);
    }
    for (int t = 0; t < args_.tokens; ++t) {
      const Floats share = hn::Set(f, shares_.share[t]);
      const Floats square = hn::Set(f, shares_.square[t]);
      for (int c = 0; c < C; ++c) {
        const Floats value = widen(Value(t, d) + c * kLanes);
        const Floats off = hn::Sub(value, output[c]);
        const Floats focal_off = hn::Sub(value, focal[c]);
        each_sum[c] = hn::MulAdd(share, hn::Mul(off, off), each_sum[c]);
        focal_sum[c] = hn::MulAdd(square, hn::Mul(focal_off, focal_off), focal_sum[c]);
      }
    }
    for (int c = 0; c < C; ++c) {
      StoreFocal(focal[c], d + c * kLanes);
      sums.each = hn::Add(sums.each, each_sum[c]);
      sums.focal = hn::Add(sums.focal, focal_sum[c]);
    }
  }

  HWY_INLINE const float* Value(int t, int d) const {
    return args_.value.data() + static_cast<ptrdiff_t>(t) * dim_ + d;
  }

  HWY_INLINE void StoreFocal(Floats focal, int d) const {
    alignas(64) float lane[kLanes];
    hn::Store(focal, FloatTag(), lane);
    std::copy_n(lane, std::min(kLanes, dim_ - d), focal_ + d);
  }

  const SpreadArgs& args_;
  const int dim_;
  const float* const output_;
  float* const focal_;
  const Shares shares_;
};

void SpreadTarget(const SpreadArgs& args) {
  for (size_t row = 0; row < static_cast<size_t>(args.rows); ++row) {
    const auto dim = static_cast<size_t>(args.head_dim);
    const bool sees_nothing = args.lse[row] == kHidden;
    if (sees_nothing) std::ranges::fill(args.focal_output.subspan(row * dim, dim), 0.0F);
    args.spread[row] = sees_nothing ? Spread() : RowKernel(args, row).Run();
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {

HWY_EXPORT(SpreadTarget);

void SpreadCpu(const SpreadArgs& args) {
  CheckSpread(args);
  HWY_DYNAMIC_DISPATCH(SpreadTarget)(args);
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
