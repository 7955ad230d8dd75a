// SPDX-License-Identifier: Apache-2.0
//
// A decoded page stays in the first-level cache while its rows pass over it, four at once. Logits
// are summed with as many (token, row) pairs as there are lanes; outputs and spreads have channels
// across the lanes, squares being added up token by token and across lanes once at the end.

#include "gpu/kernels/attend_page.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/attend_page_cpu.cc"
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
constexpr int kVectors = kLanes == 16 ? 2 : 1;  // Of channels at once: R * 4 of each, and 2 R.

struct WholeVector {
  HWY_INLINE Floats operator()(const float* x) const { return Widen(x); }
};
struct PartOfVector {
  int count;
  HWY_INLINE Floats operator()(const float* x) const { return WidenTail(x, count); }
};

// R rows of a page.
template <int R>
class PageKernel {
 public:
  HWY_INLINE PageKernel(const AttendPageArgs& args, int row)
      : args_(args),
        dim_(args.head_dim),
        tokens_(args.tokens),
        padded_((args.tokens + kLanes - 1) / kLanes * kLanes),
        row_(static_cast<size_t>(row)),
        query_(&args.query[row_ * static_cast<size_t>(dim_)]),
        output_(&args.output[row_ * static_cast<size_t>(dim_)]),
        focal_(&args.focal_output[row_ * static_cast<size_t>(dim_)]) {}

  HWY_INLINE void Run() {
    Logits();
    for (int r = 0; r < R; ++r) Shares(r);
    EachChannels([this](int d, auto channels, auto widen) {
      this->template AddValues<decltype(channels)::value>(d, widen);
    });
    const FloatTag f;
    Floats each[R];
    Floats focal[R];
    for (int r = 0; r < R; ++r) each[r] = focal[r] = hn::Zero(f);
    EachChannels([&](int d, auto channels, auto widen) {
      AddSquares<decltype(channels)::value>(d, widen, each, focal);
    });
    for (int r = 0; r < R; ++r) Finish(r, each[r], focal[r]);
  }

 private:
  static constexpr int kTokens = kLanes / R;  // Whose logits are summed together.

  HWY_INLINE const float* Key(int t) const {
    return args_.page.data() + static_cast<ptrdiff_t>(t) * dim_;
  }
  HWY_INLINE const float* Value(int t) const { return Key(tokens_ + t); }

  // `each` is called with a first channel, how many vectors of them, and how to load one.
  template <class Each>
  HWY_INLINE void EachChannels(Each each) {
    int d = 0;
    for (; d + kVectors * kLanes <= dim_; d += kVectors * kLanes)
      each(d, std::integral_constant<int, kVectors>(), WholeVector());
    for (; d + kLanes <= dim_; d += kLanes)
      each(d, std::integral_constant<int, 1>(), WholeVector());
    if (d < dim_) each(d, std::integral_constant<int, 1>(), PartOfVector{dim_ - d});
  }

  HWY_INLINE void Logits() {
    const FloatTag f;
    for (int t = 0; t < tokens_; t += kTokens) {
      const float* key[kTokens];
      for (int i = 0; i < kTokens; ++i) key[i] = Key(std::min(t + i, tokens_ - 1));
      Floats sum[kLanes];
      for (Floats& lane : sum) lane = hn::Zero(f);
      int d = 0;
      for (; d + kLanes <= dim_; d += kLanes) AddProducts(key, d, WholeVector(), sum);
      if (d < dim_) AddProducts(key, d, PartOfVector{dim_ - d}, sum);
      alignas(64) float logit[kLanes];
      hn::Store(hn::Mul(Sums(sum), hn::Set(f, args_.scale)), f, logit);
      for (int r = 0; r < R; ++r) std::copy_n(logit + r * kTokens, kTokens, share_[r] + t);
    }
    for (int r = 0; r < R; ++r) Hide(r);
  }

  template <class WidenRow>
  HWY_INLINE void AddProducts(const float* const* key, int d, WidenRow widen, Floats* sum) const {
    Floats q[R];
    for (int r = 0; r < R; ++r) q[r] = widen(query_ + static_cast<ptrdiff_t>(r) * dim_ + d);
    for (int i = 0; i < kTokens; ++i) {
      const Floats k = widen(key[i] + d);
      for (int r = 0; r < R; ++r) sum[r * kTokens + i] = hn::MulAdd(k, q[r], sum[r * kTokens + i]);
    }
  }

  HWY_INLINE void Hide(int r) {
    const uint64_t seen = args_.visible[row_ + static_cast<size_t>(r)];
    for (int t = 0; t < tokens_; ++t) {
      if ((seen >> t & 1) == 0) share_[r][t] = kHidden;
    }
    std::fill(share_[r] + tokens_, share_[r] + padded_, kHidden);
    if (args_.logits.empty()) return;
    std::copy_n(share_[r], tokens_,
                &args_.logits[(row_ + static_cast<size_t>(r)) * static_cast<size_t>(tokens_)]);
  }

  // Logits to shares, their squares, and the sum of those.
  HWY_INLINE void Shares(int r) {
    const FloatTag f;
    float* const share = share_[r];
    Floats peak = hn::Load(f, share);
    for (int t = kLanes; t < padded_; t += kLanes) peak = hn::Max(peak, hn::Load(f, share + t));
    const float top = hn::GetLane(hn::MaxOfLanes(f, peak));
    focus_[r] = 0;
    if (top == kHidden) {
      args_.lse[row_ + static_cast<size_t>(r)] = kHidden;
      std::fill_n(share, padded_, 0.0F);
      std::fill_n(square_[r], padded_, 0.0F);
      return;
    }
    Floats total = hn::Zero(f);
    for (int t = 0; t < padded_; t += kLanes) {
      const Floats w = Exp(hn::Sub(hn::Load(f, share + t), hn::Set(f, top)));
      hn::Store(w, f, share + t);
      total = hn::Add(total, w);
    }
    const Floats whole = hn::SumOfLanes(f, total);
    args_.lse[row_ + static_cast<size_t>(r)] =
        static_cast<float>(top + std::log(static_cast<double>(hn::GetLane(whole))));
    Floats squares = hn::Zero(f);
    for (int t = 0; t < padded_; t += kLanes) {
      const Floats p = hn::Div(hn::Load(f, share + t), whole);
      hn::Store(p, f, share + t);
      hn::Store(hn::Mul(p, p), f, square_[r] + t);
      squares = hn::MulAdd(p, p, squares);
    }
    focus_[r] = hn::GetLane(hn::SumOfLanes(f, squares));
  }

  // `C` vectors of channels from d: the outputs.
  template <int C, class WidenRow>
  HWY_INLINE void AddValues(int d, WidenRow widen) {
    const FloatTag f;
    Floats output[R][C];
    Floats focal[R][C];
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) output[r][c] = focal[r][c] = hn::Zero(f);
    }
    for (int t = 0; t < tokens_; ++t) {
      Floats value[C];
      for (int c = 0; c < C; ++c) value[c] = widen(Value(t) + d + c * kLanes);
      for (int r = 0; r < R; ++r) {
        const Floats share = hn::Set(f, share_[r][t]);
        const Floats square = hn::Set(f, square_[r][t]);
        for (int c = 0; c < C; ++c) {
          output[r][c] = hn::MulAdd(share, value[c], output[r][c]);
          focal[r][c] = hn::MulAdd(square, value[c], focal[r][c]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      const Floats focus = hn::Set(f, focus_[r] > 0 ? focus_[r] : 1.0F);
      for (int c = 0; c < C; ++c) {
        Store(output[r][c], output_, r, d + c * kLanes);
        Store(hn::Div(focal[r][c], focus), focal_, r, d + c * kLanes);
      }
    }
  }

  // And what lies around them.
  template <int C, class WidenRow>
  HWY_INLINE void AddSquares(int d, WidenRow widen, Floats* each, Floats* focal) const {
    const FloatTag f;
    Floats output[R][C];
    Floats focal_output[R][C];
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < C; ++c) {
        const ptrdiff_t at = static_cast<ptrdiff_t>(r) * dim_ + d + c * kLanes;
        output[r][c] = widen(output_ + at);
        focal_output[r][c] = widen(focal_ + at);
      }
    }
    for (int t = 0; t < tokens_; ++t) {
      Floats value[C];
      for (int c = 0; c < C; ++c) value[c] = widen(Value(t) + d + c * kLanes);
      for (int r = 0; r < R; ++r) {
        const Floats share = hn::Set(f, share_[r][t]);
        const Floats square = hn::Set(f, square_[r][t]);
        for (int c = 0; c < C; ++c) {
          const Floats off = hn::Sub(value[c], output[r][c]);
          const Floats focal_off = hn::Sub(value[c], focal_output[r][c]);
          each[r] = hn::MulAdd(hn::Mul(share, off), off, each[r]);
          focal[r] = hn::MulAdd(hn::Mul(square, focal_off), focal_off, focal[r]);
        }
      }
    }
  }

  HWY_INLINE void Finish(int r, Floats each, Floats focal) const {
    constexpr double kAbove = 1 + 1.2e-4;  // The reference's, and f32.
    constexpr double kUnderflow = 1e-20;   // Products below the normal range lose 2^-150 each.
    Spread& spread = args_.spread[row_ + static_cast<size_t>(r)];
    spread = {};
    if (focus_[r] == 0) return;
    const FloatTag f;
    const auto root = [&](Floats squares) {
      const double sum = hn::GetLane(hn::SumOfLanes(f, squares));
      return static_cast<float>(std::sqrt(sum) * kAbove + kUnderflow);
    };
    spread = {
        .each = root(each), .focus = static_cast<float>(focus_[r] * kAbove), .focal = root(focal)};
  }

  HWY_INLINE void Store(Floats x, float* rows, int r, int d) const {
    float* const out = rows + static_cast<ptrdiff_t>(r) * dim_ + d;
    if (d + kLanes <= dim_) return hn::StoreU(x, FloatTag(), out);
    alignas(64) float lane[kLanes];
    hn::Store(x, FloatTag(), lane);
    std::copy_n(lane, dim_ - d, out);
  }

  const AttendPageArgs& args_;
  const int dim_;
  const int tokens_;
  const int padded_;  // Tokens, in whole vectors.
  const size_t row_;
  const float* const query_;
  float* const output_;
  float* const focal_;
  alignas(64) float share_[R][kPageTokensMax + kLanes];  // First logits.
  alignas(64) float square_[R][kPageTokensMax + kLanes];
  float focus_[R];  // 0: the row sees nothing.
};

void AttendPageTarget(const AttendPageArgs& args) {
  int row = 0;
  for (; row + 4 <= args.rows; row += 4) PageKernel<4>(args, row).Run();
  for (; row + 2 <= args.rows; row += 2) PageKernel<2>(args, row).Run();
  if (row < args.rows) PageKernel<1>(args, row).Run();
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {

HWY_EXPORT(AttendPageTarget);

void AttendPageCpu(const AttendPageArgs& args) {
  CheckAttendPage(args);
  HWY_DYNAMIC_DISPATCH(AttendPageTarget)(args);
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
