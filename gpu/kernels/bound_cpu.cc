// SPDX-License-Identifier: Apache-2.0
//
// Bounds for kLanes pages at a time: dot products of each page with up to eight rows held in
// registers, summed so that lane l holds page l, and the formulas of bound.h on whole vectors.
//
// Everything is f32, so everything is moved outward by what f32 may have lost, counted in units of
// 2^-24 of the largest magnitude that could have been rounded (Cauchy-Schwarz: scale |q| |k|).

#include "gpu/kernels/bound.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/bound_cpu.cc"
#include <hwy/aligned_allocator.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "gpu/cpu/simd-inl.h"
#include "gpu/kernels/digest.h"
#include "gpu/outward.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

using Half = hwy::float16_t;

constexpr float kUnit = 0x1p-24F;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kRowsMax = kLanes == 16 ? 8 : 4;  // Rows of a page whose sums fit the registers.
constexpr int kPrefetchPages = 16;              // Some 5 to 10 KB ahead; digests lie anywhere.

constexpr int Log2(int lanes) {
  return lanes == 1 ? 0 : 1 + Log2(lanes / 2);
}

// Roundings that a product meets on its way into a sum over head_dim channels in kLanes lanes.
HWY_INLINE float SumRoundings(int head_dim) {
  return static_cast<float>((head_dim + kLanes - 1) / kLanes + Log2(kLanes));
}

// How many of the rows that are left meet a page at once.
HWY_INLINE int BlockRows(int rows_left) {
  for (int rows = kRowsMax; rows > 1; rows /= 2) {
    if (rows_left >= rows) return rows;
  }
  return 1;
}

// Rows in blocks, one after the other. In a block lie kLanes channels of its first row, of its
// second …, then the next kLanes channels: what meets a page lies side by side. Zeros past
// head_dim.
class BlockedRows {
 public:
  // `rows` is [count, head_dim]; every element is multiplied by `factor`.
  BlockedRows(std::span<const float> rows, int head_dim, float factor)
      : padded_((static_cast<size_t>(head_dim) + kLanes - 1) / kLanes * kLanes),
        element_(hwy::AllocateAligned<float>(rows.size() / static_cast<size_t>(head_dim) * padded_ +
                                             kLanes)) {
    const auto dim = static_cast<size_t>(head_dim);
    const int count = static_cast<int>(rows.size() / dim);
    for (int first = 0; first < count; first += BlockRows(count - first)) {
      float* out = &element_[static_cast<size_t>(first) * padded_];
      for (size_t d = 0; d < padded_; d += kLanes) {
        for (int r = first; r < first + BlockRows(count - first); ++r, out += kLanes) {
          const float* const row = &rows[static_cast<size_t>(r) * dim];
          for (size_t l = 0; l < kLanes; ++l) out[l] = d + l < dim ? factor * row[d + l] : 0.0F;
        }
      }
    }
    for (int r = 0; r < count; ++r)
      norm_.push_back(NormUp(&rows[static_cast<size_t>(r) * dim], dim));
    for (float& norm : norm_)
      norm = FloatUp(std::fabs(static_cast<double>(factor)) * norm * (1 + 1e-6));
  }

  const float* Block(int first_row) const {
    return &element_[static_cast<size_t>(first_row) * padded_];
  }
  // At least the l2 norm of a row.
  float norm(int row) const { return norm_[static_cast<size_t>(row)]; }

 private:
  static float NormUp(const float* row, size_t dim) {
    double squares = 0;
    for (size_t d = 0; d < dim; ++d) squares += static_cast<double>(row[d]) * row[d];
    return FloatUp(std::sqrt(squares) * (1 + 1e-12));
  }

  size_t padded_;
  hwy::AlignedFreeUniquePtr<float[]> element_;
  std::vector<float> norm_;
};

HWY_INLINE Floats WidenAt(const Half* row, int d, int head_dim) {
  return d + kLanes <= head_dim ? Widen(row + d) : WidenTail(row + d, head_dim - d);
}

// An edge of the box, which is infinite where an f32 key lies beyond f16.
HWY_INLINE Floats WidenEdge(const Half* row, int d, int head_dim) {
  const Floats edge = WidenAt(row, d, head_dim);
#if HWY_TARGET == HWY_SSE4  // Widens f16 in integers, infinity to 65536.
  const FloatTag f;
  const auto is_finite = hn::Lt(hn::Abs(edge), hn::Set(f, 65536.0F));
  return hn::IfThenElse(is_finite, edge, hn::CopySignToAbs(hn::Set(f, kInfinity), edge));
#else
  return edge;
#endif
}

// Sums of rows against pages: [quantity][row][page], each still kLanes partial sums.
template <int kQuantities>
struct PageSums {
  Floats sum[kQuantities][kRowsMax][kLanes];

  HWY_INLINE Floats Page(int quantity, int row) const { return Sums(sum[quantity][row]); }
};

// Every cache line that `count` halves from `first` touch.
HWY_INLINE void PrefetchHalves(const std::byte* digest, int first, int count) {
  const std::byte* const begin = digest + first * 2;
  for (int b = 0; b < count * 2; b += 64) __builtin_prefetch(begin + b, 0, 2);
  __builtin_prefetch(begin + count * 2 - 1, 0, 2);
}

enum BoxQuantity { kCentre, kSpread, kMean, kBoxQuantities };

// One page and a block of R rows: q . (low + high), |q| . (high - low), q . mean.
template <int R>
HWY_INLINE void AddBox(const DigestView& page, int head_dim, const float* query, int lane,
                       PageSums<kBoxQuantities>& sums) {
  const FloatTag f;
  const auto* low = reinterpret_cast<const Half*>(page.key_low);
  const auto* high = reinterpret_cast<const Half*>(page.key_high);
  const auto* mean = reinterpret_cast<const Half*>(page.key_mean);
  Floats centre[R];
  Floats spread[R];
  Floats middle[R];
  for (int r = 0; r < R; ++r) centre[r] = spread[r] = middle[r] = hn::Zero(f);
  for (int d = 0; d < head_dim; d += kLanes) {
    const Floats least = WidenEdge(low, d, head_dim);
    const Floats most = WidenEdge(high, d, head_dim);
    const Floats average = WidenAt(mean, d, head_dim);
    const Floats twice_centre = hn::Add(most, least);
    const Floats width = hn::Sub(most, least);
    for (int r = 0; r < R; ++r, query += kLanes) {
      const Floats q = hn::Load(f, query);
      centre[r] = hn::MulAdd(q, twice_centre, centre[r]);
      spread[r] = hn::MulAdd(hn::Abs(q), width, spread[r]);
      middle[r] = hn::MulAdd(q, average, middle[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    sums.sum[kCentre][r][lane] = centre[r];
    sums.sum[kSpread][r][lane] = spread[r];
    sums.sum[kMean][r][lane] = middle[r];
  }
}

// What a tile of pages brings beside its channels, one page a lane.
struct PageLanes {
  alignas(64) float tokens[kLanes];
  alignas(64) float absent[kLanes];
  alignas(64) float key_norm[kLanes];
  alignas(64) float mean_error[kLanes];
  alignas(64) float log_low[kLanes];   // ln of absent, rounded down
  alignas(64) float log_high[kLanes];  // and up
};

struct LogTable {
  LogTable() {
    for (int n = 1; n <= kPageTokensMax; ++n) {
      low[static_cast<size_t>(n)] = FloatDown(std::log(n) * (1 - 1e-12));
      high[static_cast<size_t>(n)] = FloatUp(std::log(n) * (1 + 1e-12));
    }
  }
  std::array<float, kPageTokensMax + 1> low = {};
  std::array<float, kPageTokensMax + 1> high = {};
};

// ln x for normal 0 < x <= 1, within 1e-6 of |ln x|: x = m 2^e with m next to 1, polynomial of
// Cephes logf (Moshier) for ln m, ln 2 in two parts.
HWY_INLINE Floats Log(Floats x) {
  const FloatTag f;
  const hn::RebindToSigned<FloatTag> integer;
  // Counted from sqrt(1/2), so that m lies in [sqrt(1/2), sqrt(2)).
  const auto root_half = hn::Set(integer, 0x3F3504F3);
  const auto bits = hn::Sub(hn::BitCast(integer, x), root_half);
  const auto exponent = hn::ShiftRight<23>(bits);
  const Floats e = hn::ConvertTo(f, exponent);
  const Floats m =
      hn::Sub(hn::BitCast(f, hn::Sub(hn::BitCast(integer, x), hn::ShiftLeft<23>(exponent))),
              hn::Set(f, 1.0F));
  const Floats square = hn::Mul(m, m);
  Floats p = hn::Set(f, 7.0376836292e-2F);
  for (const float c : {-1.1514610310e-1F, 1.1676998740e-1F, -1.2420140846e-1F, 1.4249322787e-1F,
                        -1.6668057665e-1F, 2.0000714765e-1F, -2.4999993993e-1F, 3.3333331174e-1F}) {
    p = hn::MulAdd(p, m, hn::Set(f, c));
  }
  p = hn::Mul(hn::Mul(p, m), square);
  p = hn::MulAdd(e, hn::Set(f, -2.12194440e-4F), p);
  p = hn::NegMulAdd(square, hn::Set(f, 0.5F), p);
  return hn::MulAdd(e, hn::Set(f, 0.693359375F), hn::Add(m, p));
}

// y where a comparison with NaN fails.
HWY_INLINE Floats IfGreater(Floats x, Floats y) {
  return hn::IfThenElse(hn::Gt(x, y), x, y);
}
HWY_INLINE Floats IfLess(Floats x, Floats y) {
  return hn::IfThenElse(hn::Lt(x, y), x, y);
}

struct Bracket {
  Floats low;
  Floats high;
};

class BoundKernel {
 public:
  explicit BoundKernel(const BoundArgs& args)
      : args_(args),
        // Halved, for the box is kept as twice its centre and twice its half width.
        query_(args.query, args.head_dim, 0.5F * args.scale),
        step_(std::sqrt(static_cast<float>(args.head_dim)) * 0x1p-24F),
        roundings_(SumRoundings(args.head_dim) + 8) {}

  HWY_INLINE void Run() {
    for (int page = 0; page < args_.pages; page += kLanes) {
      const int count = std::min(kLanes, args_.pages - page);
      FillLanes(page, count);
      int row = 0;
      if constexpr (kRowsMax == 8) {
        for (; row + 8 <= args_.rows; row += 8) Rows<8>(row, page, count);
      }
      for (; row + 4 <= args_.rows; row += 4) Rows<4>(row, page, count);
      for (; row + 2 <= args_.rows; row += 2) Rows<2>(row, page, count);
      if (row < args_.rows) Rows<1>(row, page, count);
    }
  }

 private:
  HWY_INLINE const std::byte* digest(int page) const {
    return args_.digest[static_cast<size_t>(page)];
  }

  HWY_INLINE void FillLanes(int page, int count) {
    static const LogTable log;
    for (int l = 0; l < kLanes; ++l) {
      const int p = page + std::min(l, count - 1);
      const DigestTail& tail = DigestView(digest(p), args_.head_dim).tail;
      CheckAbsent(args_, static_cast<size_t>(p), tail.tokens);
      const auto absent = static_cast<size_t>(args_.absent[static_cast<size_t>(p)]);
      lanes_.tokens[l] = static_cast<float>(tail.tokens);
      lanes_.absent[l] = static_cast<float>(absent);
      lanes_.key_norm[l] = tail.key_norm_max;
      lanes_.mean_error[l] = tail.key_mean_error;
      lanes_.log_low[l] = log.low[absent];
      lanes_.log_high[l] = log.high[absent];
    }
  }

  template <int R>
  HWY_INLINE void Rows(int row, int page, int count) {
    for (int l = 0; l < count; ++l) {
      if (row == 0) {
        const int ahead = std::min(page + l + kPrefetchPages, args_.pages - 1);
        PrefetchHalves(digest(ahead), 0, 3 * args_.head_dim);
        PrefetchHalves(digest(ahead), 4 * args_.head_dim, sizeof(DigestTail) / 2);
      }
      AddBox<R>(DigestView(digest(page + l), args_.head_dim), args_.head_dim, query_.Block(row), l,
                sums_);
    }
    for (int l = count; l < kLanes; ++l) {
      for (auto& quantity : sums_.sum) {
        for (int r = 0; r < R; ++r) quantity[r][l] = hn::Zero(FloatTag());
      }
    }
    for (int r = 0; r < R; ++r) Finish(row + r, r, page, count);
  }

  // Where the logits of each page's tokens can lie.
  HWY_INLINE Bracket LogitBracket(int r, Floats size, Floats largest) const {
    const FloatTag f;
    const Floats centre = sums_.Page(kCentre, r);
    const Floats spread = sums_.Page(kSpread, r);
    // The box reaches out to at most |q| times the root of the tokens' squared norms; 1.001 and a
    // step of subnormal f16 in each channel cover its own rounding.
    const Floats reach =
        hn::MulAdd(hn::Sqrt(hn::Load(f, lanes_.tokens)), hn::Mul(largest, hn::Set(f, 1.001F)),
                   hn::Mul(size, hn::Set(f, step_)));
    const Floats slack = hn::MulAdd(reach, hn::Set(f, roundings_ * kUnit), hn::Set(f, 1e-30F));
    const Floats norms = hn::MulAdd(largest, hn::Set(f, 8 * kUnit), largest);
    return {IfGreater(hn::Sub(hn::Sub(centre, spread), slack), hn::Neg(norms)),
            IfLess(hn::Add(hn::Add(centre, spread), slack), norms)};
  }

  struct Mean {
    Floats logit;
    Floats open;
  };

  // The absent tokens' mean logit, and how far off the exact one can be.
  HWY_INLINE Mean AbsentMean(int row, int r, Floats resident_sum, Floats largest) const {
    const FloatTag f;
    const Floats tokens = hn::Load(f, lanes_.tokens);
    const Floats absent = hn::Load(f, lanes_.absent);
    const Floats mean = hn::Mul(sums_.Page(kMean, r), hn::Set(f, 2.0F));
    const Floats size = hn::Set(f, 2 * query_.norm(row));
    const float error = args_.resident_logit_error.empty()
                            ? 0.0F
                            : args_.resident_logit_error[static_cast<size_t>(row)];
    Floats open = hn::MulAdd(largest, hn::Set(f, roundings_ * kUnit),
                             hn::Mul(size, hn::Load(f, lanes_.mean_error)));
    open = hn::MulAdd(open, tokens, hn::Mul(hn::Sub(tokens, absent), hn::Set(f, error)));
    open = hn::MulAdd(hn::Abs(resident_sum), hn::Set(f, 6 * kUnit), open);
    open = hn::MulAdd(open, hn::Set(f, 1 + 0x1p-18F), hn::Set(f, 1e-30F));
    return {hn::Div(hn::Sub(hn::Mul(mean, tokens), resident_sum), absent), hn::Div(open, absent)};
  }

  // ln of the mean of e^z over z in the bracket whose mean is at most `mean`, less bracket.high.
  HWY_INLINE Floats Chord(const Bracket& logit, Floats mean) const {
    const FloatTag f;
    const Floats one = hn::Set(f, 1.0F);
    const Floats width = hn::Sub(logit.high, logit.low);
    const Floats up = hn::Set(f, 1 + 8 * kUnit);
    const Floats share =
        hn::Min(hn::Max(hn::Mul(hn::Div(hn::Sub(mean, logit.low), width), up), hn::Zero(f)), one);
    const Floats at_low = Exp(hn::Mul(width, hn::Set(f, -(1 - 8 * kUnit))));
    const Floats sum = hn::MulAdd(hn::Sub(one, share), at_low, share);
    // A floor keeps the logarithm finite; it is above what it replaces.
    const Floats log = Log(hn::Max(sum, hn::Set(f, 0x1p-100F)));
    const auto is_usable =
        hn::And(hn::Gt(width, hn::Zero(f)), hn::Lt(width, hn::Set(f, kInfinity)));
    // A relative 1e-6 and as much again: the roundings above, and Log's few units.
    const Floats outward = hn::MulAdd(log, hn::Set(f, 1 - 1e-6F), hn::Set(f, 1e-6F));
    return hn::IfThenElseZero(is_usable, outward);
  }

  HWY_INLINE void Finish(int row, int r, int page, int count) const {
    const FloatTag f;
    const size_t at =
        static_cast<size_t>(row) * static_cast<size_t>(args_.pages) + static_cast<size_t>(page);
    const Floats size = hn::Set(f, 2 * query_.norm(row));
    const Floats largest = hn::Mul(size, hn::Load(f, lanes_.key_norm));
    const Bracket logit = LogitBracket(r, size, largest);
    const Mean mean = AbsentMean(row, r, ResidentSum(at, count), largest);
    const Floats jensen = IfGreater(hn::Sub(mean.logit, mean.open), logit.low);
    const Floats above = IfLess(hn::Add(mean.logit, mean.open), logit.high);
    const Floats chord = Chord(logit, above);
    const Floats log_low = hn::Load(f, lanes_.log_low);
    const Floats log_high = hn::Load(f, lanes_.log_high);

    const Floats reach = hn::Add(hn::Max(hn::Abs(logit.low), hn::Abs(logit.high)),
                                 hn::Add(log_high, hn::Abs(chord)));
    const Floats slack = hn::MulAdd(reach, hn::Set(f, 8 * kUnit), hn::Set(f, 1e-30F));
    const Floats low = hn::Sub(hn::Add(log_low, jensen), slack);
    const Floats high = hn::Add(hn::Add(log_high, hn::Add(logit.high, chord)), slack);
    const Floats estimate = hn::Add(log_low, IfLess(IfGreater(mean.logit, logit.low), logit.high));
    // Nothing above can have overflowed where the largest magnitude is far from the end.
    const auto is_tame = hn::Lt(largest, hn::Set(f, 1e30F));
    StoreLanes(hn::IfThenElse(is_tame, low, hn::Set(f, -kInfinity)), &args_.mass_low[at], count);
    StoreLanes(hn::IfThenElse(is_tame, high, hn::Set(f, kInfinity)), &args_.mass_high[at], count);
    StoreLanes(hn::IfThenElse(is_tame, estimate, log_low), &args_.mass_estimate[at], count);
  }

  // 0 for pages without resident tokens, whatever the caller has there.
  HWY_INLINE Floats ResidentSum(size_t at, int count) const {
    const FloatTag f;
    if (args_.resident_logit_sum.empty()) return hn::Zero(f);
    alignas(64) float lane[kLanes] = {};
    std::copy_n(&args_.resident_logit_sum[at], count, lane);
    const auto is_partial = hn::Lt(hn::Load(f, lanes_.absent), hn::Load(f, lanes_.tokens));
    return hn::IfThenElseZero(is_partial, hn::Load(f, lane));
  }

  HWY_INLINE static void StoreLanes(Floats x, float* out, int count) {
    const FloatTag f;
    if (count == kLanes) return hn::StoreU(x, f, out);
    alignas(64) float lane[kLanes];
    hn::Store(x, f, lane);
    std::copy_n(lane, count, out);
  }

  const BoundArgs& args_;
  const BlockedRows query_;  // Halved, see the constructor.
  const float step_;         // What a step of subnormal f16 in every channel comes to.
  const float roundings_;
  PageLanes lanes_;
  PageSums<kBoxQuantities> sums_;
};

void BoundTarget(const BoundArgs& args) {
  if (args.rows > 0) BoundKernel(args).Run();
}

// One page and a block of R rows: |output - value_mean|^2.
template <int R>
HWY_INLINE void AddDistance(const DigestView& page, int head_dim, const float* output, int lane,
                            PageSums<1>& sums) {
  const FloatTag f;
  const auto* mean = reinterpret_cast<const Half*>(page.value_mean);
  Floats square[R];
  for (int r = 0; r < R; ++r) square[r] = hn::Zero(f);
  for (int d = 0; d < head_dim; d += kLanes) {
    const Floats average = WidenAt(mean, d, head_dim);
    for (int r = 0; r < R; ++r, output += kLanes) {
      const Floats off = hn::Sub(average, hn::Load(f, output));
      square[r] = hn::MulAdd(off, off, square[r]);
    }
  }
  for (int r = 0; r < R; ++r) sums.sum[0][r][lane] = square[r];
}

class DistanceKernel {
 public:
  explicit DistanceKernel(const ValueDistanceArgs& args)
      : args_(args),
        output_(args.output, args.head_dim, 1.0F),
        up_(1 + (SumRoundings(args.head_dim) + 8) * kUnit) {}

  HWY_INLINE void Run() {
    for (int page = 0; page < args_.pages; page += kLanes) {
      const int count = std::min(kLanes, args_.pages - page);
      int row = 0;
      if constexpr (kRowsMax == 8) {
        for (; row + 8 <= args_.rows; row += 8) Rows<8>(row, page, count);
      }
      for (; row + 4 <= args_.rows; row += 4) Rows<4>(row, page, count);
      for (; row + 2 <= args_.rows; row += 2) Rows<2>(row, page, count);
      if (row < args_.rows) Rows<1>(row, page, count);
    }
  }

 private:
  template <int R>
  HWY_INLINE void Rows(int row, int page, int count) {
    const FloatTag f;
    alignas(64) float radius[kLanes] = {};
    alignas(64) float norm[kLanes] = {};
    for (int l = 0; l < kLanes; ++l) {
      const auto p = static_cast<size_t>(page + std::min(l, count - 1));
      const DigestView digest(args_.digest[p], args_.head_dim);
      if (row == 0) {
        const size_t ahead = std::min(p + kPrefetchPages, args_.digest.size() - 1);
        PrefetchHalves(args_.digest[ahead], 3 * args_.head_dim, args_.head_dim);
        PrefetchHalves(args_.digest[ahead], 4 * args_.head_dim, sizeof(DigestTail) / 2);
      }
      radius[l] = digest.tail.value_radius;
      norm[l] = digest.tail.value_norm_max;
      AddDistance<R>(digest, args_.head_dim, output_.Block(row), l, sums_);
    }
    for (int r = 0; r < R; ++r) {
      const Floats to_mean =
          hn::MulAdd(hn::Sqrt(sums_.Page(0, r)), hn::Set(f, up_), hn::Load(f, radius));
      const Floats norms = hn::Add(hn::Set(f, output_.norm(row + r)), hn::Load(f, norm));
      // 1e-20: squares below the normal range lose at most 2^-150 each.
      const Floats distance =
          hn::MulAdd(IfLess(to_mean, norms), hn::Set(f, 1 + 8 * kUnit), hn::Set(f, 1e-20F));
      alignas(64) float lane[kLanes];
      hn::Store(distance, f, lane);
      const size_t at = static_cast<size_t>(row + r) * static_cast<size_t>(args_.pages) +
                        static_cast<size_t>(page);
      std::copy_n(lane, count, &args_.distance[at]);
    }
  }

  const ValueDistanceArgs& args_;
  const BlockedRows output_;
  const float up_;
  PageSums<1> sums_;
};

void ValueDistanceTarget(const ValueDistanceArgs& args) {
  if (args.rows > 0) DistanceKernel(args).Run();
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {

HWY_EXPORT(BoundTarget);
HWY_EXPORT(ValueDistanceTarget);

void BoundCpu(const BoundArgs& args) {
  CheckBound(args);
  HWY_DYNAMIC_DISPATCH(BoundTarget)(args);
}

void ValueDistanceCpu(const ValueDistanceArgs& args) {
  CheckValueDistance(args);
  HWY_DYNAMIC_DISPATCH(ValueDistanceTarget)(args);
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
