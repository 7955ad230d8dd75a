// SPDX-License-Identifier: Apache-2.0
//
// What every implementation of codes shares: its contract's checks, its error bound, and what it
// makes of norms.

#include "gpu/kernels/codes.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/status_macros.h"
#include "gpu/element.h"
#include "gpu/kernels/digest.h"
#include "gpu/outward.h"

namespace ebbtide::gpu {
namespace {

constexpr double kF64Slack = 1 + 1e-12;  // Far more than a sum of 256 terms is off in f64.

struct Channel {
  float low = 0;
  float high = 0;
  bool is_finite() const { return std::isfinite(low) && std::isfinite(high); }
};

// `box` is [low f16 x d][high f16 x d], of any alignment.
Channel ChannelAt(const std::byte* box, int head_dim, int d) {
  return {.low = ElementAt(Dtype::kF16, box, d), .high = ElementAt(Dtype::kF16, box, head_dim + d)};
}

// Its width where that is finite, exactly.
double WidthAt(const std::byte* box, int head_dim, int d) {
  const Channel channel = ChannelAt(box, head_dim, d);
  return channel.is_finite() ? static_cast<double>(channel.high) - channel.low : 0;
}

// A step, by experience: an error that spreads evenly has the deviation of its range / sqrt(12).
double StepDeviation(CodeForm form) {
  return 1 / (CodeSteps(form) * std::sqrt(12.0));
}

CodeNorms NormsAt(std::span<const std::byte> coarse, const PageShape& shape, CodeForm form) {
  CodeNorms norms;
  const size_t offset = CodeBoxBytes(shape) + (form == CodeForm::k4Bit ? 0 : sizeof(CodeNorms));
  std::memcpy(&norms, coarse.data() + offset, sizeof(norms));
  return norms;
}

// x * norm, rounded up; inf with an infinite norm even where x is 0.
float TimesNorm(double x, float norm) {
  return std::isinf(norm) ? norm : FloatUp(x * norm * kF64Slack);
}

void CheckShape(const PageShape& shape) {
  EBBTIDE_CHECK(shape.head_dim >= 1 && shape.head_dim <= kHeadDimMax,
                "codes: head_dim is 1 to 256");
  EBBTIDE_CHECK(shape.tokens >= 1 && shape.tokens <= kPageTokensMax,
                "codes: a page has 1 to 64 tokens");
}

void CheckParts(const PageShape& shape, std::span<const std::byte> digest,
                std::span<const std::byte> coarse) {
  CheckShape(shape);
  EBBTIDE_CHECK(digest.size() == DigestBytes(shape.head_dim),
                "codes: digest is DigestBytes(head_dim) long");
  EBBTIDE_CHECK(coarse.size() == CoarseBytes(shape), "codes: coarse is CoarseBytes(shape) long");
}

}  // namespace

void CheckEncode(const EncodeArgs& args) {
  CheckParts(args.shape, args.digest, args.coarse);
  EBBTIDE_CHECK(args.page.size() == args.shape.page_bytes(), "codes: page is one page long");
  EBBTIDE_CHECK(args.fine.size() == FineBytes(args.shape), "codes: fine is FineBytes(shape) long");
}

void CheckDecode(const DecodeArgs& args) {
  CheckParts(args.shape, args.digest, args.coarse);
  EBBTIDE_CHECK(args.form == CodeForm::k4Bit || args.fine.size() == FineBytes(args.shape),
                "codes: fine is FineBytes(shape) long");
  EBBTIDE_CHECK(args.page.size() == 2 * static_cast<size_t>(args.shape.tokens) *
                                        static_cast<size_t>(args.shape.head_dim),
                "codes: page is [2, tokens, head_dim]");
}

void CheckCodeErrors(const CodeErrorArgs& args) {
  CheckParts(args.shape, args.digest, args.coarse);
  EBBTIDE_CHECK(args.rows >= 0, "codes: rows is not negative");
  const auto rows = static_cast<size_t>(args.rows);
  EBBTIDE_CHECK(args.query.size() == rows * static_cast<size_t>(args.shape.head_dim),
                "codes: query is [rows, head_dim]");
  EBBTIDE_CHECK(args.logit_error.size() == rows, "codes: logit_error is [rows]");
  EBBTIDE_CHECK(args.logit_error_joint.empty() || args.logit_error_joint.size() == rows,
                "codes: logit_error_joint is [rows]");
  EBBTIDE_CHECK(args.logit_deviation.empty() || args.logit_deviation.size() == rows,
                "codes: logit_deviation is [rows]");
}

// With u = 2^-24, W = high - low > 0, M = max(|low|, |high|), p = 240 (x - low) / W:
//
// Encoding finds p with four roundings (x - low, W, 240 / W, their product) and p + 8.5 with one
// more, so it is off by at most 240 * 4.1 u + 249 u < 1240 u, and 2^-150 where the product is
// subnormal. So |p - (code - 8)| <= 1/2 + 1240 u + 2^-150, and for the coarse nibble c, with code -
// 16 c in 0 .. 15, |p - 16 c| <= 8 + 1/2 + 1240 u + 2^-150.
//
// Decoding puts rounded W for W, rounds the step, its multiple (each at most W u) and the sum (at
// most M u), each but for a factor 1 + 10 u; a step is not subnormal, for W >= 2^-24 where it is
// not 0.
//
// Together W (1240 / 240 + 3) u + M u, but for that factor. Without width every step is exact.
double CodeElementError(CodeForm form, double low, double high) {
  constexpr double kUnit = 0x1p-24;
  const double width = high - low;  // Exact: f16 are multiples of 2^-24 below 2^17.
  if (width == 0) return 0;
  const double largest = std::max(std::fabs(low), std::fabs(high));
  return width * CodeStepError(form) + kUnit * (8.5 * width + 1.01 * largest);
}

// Infinite channels are left out: what they hold may not even be finite in other units.
ResidualUnits::ResidualUnits(std::span<const float> width, bool all_finite, bool are_keys)
    : is_finite(all_finite) {
  const float largest = *std::ranges::max_element(width);
  has_width = largest > 0;
  if (!has_width) return;
  if (!are_keys) unit = std::ldexp(1.0, std::ilogb(largest));
  const auto per_unit = static_cast<float>(1 / unit);
  for (size_t d = 0; d < width.size(); ++d)
    factor[d] = width[d] > 0 ? (are_keys ? 1 / width[d] : per_unit) : 0;
}

// An element is off by four roundings at most: of the width, of its inverse, of the difference and
// of their product. With 64 rows, norms are off by 8 times as much; and by 2^-140 where products
// are subnormal.
CodeNorm ResidualUnits::NormOf(const MatrixNorms& scaled) const {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr double kRoundings = 1 + 40 * 0x1p-24;
  if (!is_finite) return {.each = kInfinity, .joint = kInfinity};
  if (!has_width) return {};
  return {.each = FloatUp(unit * (scaled.each * kRoundings + 0x1p-140)),
          .joint = FloatUp(unit * (scaled.joint * kRoundings + 0x1p-140))};
}

void StoreCodeNorms(const CodeNorms (&norms)[2], const EncodeArgs& args) {
  std::memcpy(args.coarse.data() + CodeBoxBytes(args.shape), norms, sizeof(norms));
}

double WidthNorm(const std::byte* box, int head_dim, const float* weight) {
  double squares = 0;
  for (int d = 0; d < head_dim; ++d) {
    const double x = WidthAt(box, head_dim, d) * (weight != nullptr ? weight[d] : 1.0F);
    squares += x * x;
  }
  return std::sqrt(squares) * kF64Slack;
}

void TightenLogits(const CodeErrorArgs& args, size_t row, double width_norm) {
  const CodeNorm norm = NormsAt(args.coarse, args.shape, args.form).key;
  const double reach = std::fabs(static_cast<double>(args.scale)) * width_norm;
  args.logit_error[row] = std::min(args.logit_error[row], TimesNorm(reach, norm.each));
  if (!args.logit_error_joint.empty()) args.logit_error_joint[row] = TimesNorm(reach, norm.joint);
  if (!args.logit_deviation.empty())
    args.logit_deviation[row] = static_cast<float>(reach * StepDeviation(args.form));
}

void TightenValues(const CodeErrorArgs& args, double width_norm) {
  const CodeNorm norm = NormsAt(args.coarse, args.shape, args.form).value;
  if (args.value_error != nullptr) *args.value_error = std::min(*args.value_error, norm.each);
  if (args.value_error_joint != nullptr) *args.value_error_joint = norm.joint;
  if (args.value_deviation != nullptr)
    *args.value_deviation = static_cast<float>(width_norm * StepDeviation(args.form));
}

}  // namespace ebbtide::gpu
