// SPDX-License-Identifier: Apache-2.0
//
// Page CAOTE in one pass over the parts: what weighs nothing is not read, distances are added up in
// f64, which no value under- or overflows. A row that one page has more than half of goes over its
// parts once more, for what the others add up to.

#include "gpu/kernels/page_damage.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/page_damage_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "gpu/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr double kMost = std::numeric_limits<float>::max();

using DoubleTag = hn::CappedTag<double, 8>;

// Eight or fewer f32, as f64.
HWY_INLINE hn::Vec<DoubleTag> Wide(hn::Vec<hn::Rebind<float, DoubleTag>> x) {
  return hn::PromoteTo(DoubleTag(), x);
}

// |a - b|^2; differences are rounded to f32.
HWY_INLINE double SquaredDistance(const float* a, const float* b, size_t dim) {
  const DoubleTag d;
  const hn::Rebind<float, DoubleTag> f32;
  const size_t lanes = hn::Lanes(d);
  auto sum = hn::Zero(d);
  auto sum_too = hn::Zero(d);  // Additions wait for each other.
  const auto add = [&](size_t i, auto& to) {
    const auto off = Wide(hn::Sub(hn::LoadU(f32, a + i), hn::LoadU(f32, b + i)));
    to = hn::MulAdd(off, off, to);
  };
  size_t i = 0;
  for (; i + 2 * lanes <= dim; i += 2 * lanes) {
    add(i, sum);
    add(i + lanes, sum_too);
  }
  for (; i + lanes <= dim; i += lanes) add(i, sum);
  double total = hn::GetLane(hn::SumOfLanes(d, hn::Add(sum, sum_too)));
  for (; i < dim; ++i) {
    const double off = static_cast<double>(a[i] - b[i]);
    total += off * off;
  }
  return total;
}

// total += weight * part
HWY_INLINE void AddWeighted(double weight, const float* part, size_t dim, double* total) {
  const DoubleTag d;
  const hn::Rebind<float, DoubleTag> f32;
  const auto w = hn::Set(d, weight);
  size_t i = 0;
  for (; i + hn::Lanes(d) <= dim; i += hn::Lanes(d)) {
    const auto x = Wide(hn::LoadU(f32, part + i));
    hn::StoreU(hn::MulAdd(w, x, hn::LoadU(d, total + i)), d, total + i);
  }
  for (; i < dim; ++i) total[i] += weight * static_cast<double>(part[i]);
}

// x := e^x, of any number.
HWY_INLINE void ExpAll(std::vector<float>& x) {
  const FloatTag f;
  size_t i = 0;
  for (; i + kLanes <= x.size(); i += kLanes) hn::StoreU(Exp(hn::LoadU(f, &x[i])), f, &x[i]);
  alignas(64) float last[kLanes] = {};
  std::copy(x.begin() + static_cast<ptrdiff_t>(i), x.end(), last);
  hn::Store(Exp(hn::Load(f, last)), f, last);
  std::copy(last, last + (x.size() - i), x.begin() + static_cast<ptrdiff_t>(i));
}

class PageDamageKernel {
 public:
  explicit PageDamageKernel(const PageDamageArgs& args)
      : args_(args),
        rows_(static_cast<size_t>(args.rows)),
        dim_(static_cast<size_t>(args.head_dim)),
        square_(args.damage.size(), 0.0) {}

  void Run() {
    Weigh();
    for (size_t r = 0; r < rows_; ++r) FindHeavy(r);
    for (size_t p = 0; p < square_.size(); ++p) {
      for (size_t r = 0; r < rows_; ++r) {
        const double weight = weight_[p * rows_ + r];
        if (weight == 0) continue;
        square_[p] += weight * weight * SquaredDistance(Part(p, r), &args_.output[r * dim_], dim_);
      }
    }
    for (const Heavy& heavy : heavy_) square_[heavy.page] += HeavySquare(heavy);
    std::ranges::transform(square_, args_.damage.begin(), [](double square) {
      return static_cast<float>(std::min(std::sqrt(square), kMost));
    });
  }

 private:
  // A page that holds more than half of a row's weight.
  struct Heavy {
    size_t page;
    size_t row;
    double others_peak;  // The largest log-sum-exp of what else the row attends to.
  };

  const float* Part(size_t page, size_t row) const {
    return &args_.part_output[(page * rows_ + row) * dim_];
  }

  // weight_ := e / (1 - e), 0 for rows that saw nothing.
  void Weigh() {
    weight_.resize(args_.part_lse.size());
    for (size_t p = 0; p < square_.size(); ++p) {
      for (size_t r = 0; r < rows_; ++r) {
        const float lse = args_.lse[r];
        weight_[p * rows_ + r] =
            lse == kMinusInfinity ? kMinusInfinity : args_.part_lse[p * rows_ + r] - lse;
      }
    }
    ExpAll(weight_);
    // e passes 1/2 in heavy pages only, or by a rounding.
    for (float& e : weight_) e = std::min(e, 0.5F) / (1 - std::min(e, 0.5F));
  }

  // Of two pages that have as much the formula serves both: rounding can make them pass 1/2, and
  // equal pages are equal.
  void FindHeavy(size_t r) {
    if (args_.lse[r] == kMinusInfinity) return;
    float peak = kMinusInfinity;
    float second = kMinusInfinity;
    size_t page = 0;
    for (size_t p = 0; p < square_.size(); ++p) {
      const float lse = args_.part_lse[p * rows_ + r];
      if (lse > peak) {
        second = peak;
        peak = lse;
        page = p;
      } else {
        second = std::max(second, lse);
      }
    }
    const double share = std::exp(static_cast<double>(peak) - static_cast<double>(args_.lse[r]));
    if (!(share > 0.5) || peak == second) return;
    weight_[page * rows_ + r] = 0;
    const double rest = args_.rest_lse.empty() ? kMinusInfinity : args_.rest_lse[r];
    heavy_.push_back({page, r, std::max<double>(second, rest)});
  }

  // (e * |output without the page - what it attends to by itself|)^2
  double HeavySquare(const Heavy& heavy) const {
    std::vector<double> without(dim_, 0.0);
    if (heavy.others_peak != kMinusInfinity) AttendOthers(heavy, without);
    const float* const part = Part(heavy.page, heavy.row);
    double squares = 0;
    for (size_t d = 0; d < dim_; ++d) {
      const double off = without[d] - static_cast<double>(part[d]);
      squares += off * off;
    }
    const double part_lse = args_.part_lse[heavy.page * rows_ + heavy.row];
    const double share = std::min(1.0, std::exp(part_lse - args_.lse[heavy.row]));
    return share * share * squares;
  }

  void AttendOthers(const Heavy& heavy, std::vector<double>& without) const {
    double mass = 0;
    for (size_t p = 0; p < square_.size(); ++p) {
      // In f64, for what the others attend to may cancel.
      const double weight =
          p == heavy.page ? 0
                          : std::exp(static_cast<double>(args_.part_lse[p * rows_ + heavy.row]) -
                                     heavy.others_peak);
      if (weight == 0) continue;
      mass += weight;
      AddWeighted(weight, Part(p, heavy.row), dim_, without.data());
    }
    if (!args_.rest_lse.empty()) {
      const double rest = std::exp(args_.rest_lse[heavy.row] - heavy.others_peak);
      mass += rest;
      if (rest > 0) AddWeighted(rest, &args_.rest_output[heavy.row * dim_], dim_, without.data());
    }
    for (double& x : without) x /= mass;
  }

  const PageDamageArgs& args_;
  const size_t rows_;
  const size_t dim_;
  std::vector<double> square_;  // [pages] of damage
  std::vector<float> weight_;   // [pages, rows]
  std::vector<Heavy> heavy_;
};

void PageDamageTarget(const PageDamageArgs& args) {
  PageDamageKernel(args).Run();
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {

HWY_EXPORT(PageDamageTarget);

void PageDamageCpu(const PageDamageArgs& args) {
  CheckPageDamage(args);
  HWY_DYNAMIC_DISPATCH(PageDamageTarget)(args);
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
