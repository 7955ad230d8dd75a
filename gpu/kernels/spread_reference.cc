// SPDX-License-Identifier: Apache-2.0
//
// Spreads in f64, rounded up once.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "base/status_macros.h"
#include "gpu/kernels/spread.h"

namespace ebbtide::gpu {
namespace {

// Above the rounding of shares and sums, here and in f32.
constexpr double kAbove = 1 + 1e-4;

std::vector<double> SharesOf(std::span<const float> logits, double lse) {
  std::vector<double> share;
  double total = 0;
  for (const float logit : logits) total += share.emplace_back(std::exp(logit - lse));
  for (double& each : share) each /= total;
  return share;
}

void SpreadRow(const SpreadArgs& args, size_t row) {
  const auto dim = static_cast<size_t>(args.head_dim);
  const auto tokens = static_cast<size_t>(args.tokens);
  const std::span<float> focal = args.focal_output.subspan(row * dim, dim);
  std::ranges::fill(focal, 0.0F);
  args.spread[row] = {};
  if (args.lse[row] == -std::numeric_limits<float>::infinity()) return;
  const std::vector<double> share =
      SharesOf(args.logits.subspan(row * tokens, tokens), args.lse[row]);
  double focus = 0;
  for (const double p : share) focus += p * p;
  for (size_t d = 0; d < dim; ++d) {
    double sum = 0;
    for (size_t t = 0; t < tokens; ++t) sum += share[t] * share[t] * args.value[t * dim + d];
    focal[d] = static_cast<float>(sum / focus);
  }
  double squares = 0;
  double focal_squares = 0;
  for (size_t t = 0; t < tokens; ++t) {
    for (size_t d = 0; d < dim; ++d) {
      const double value = args.value[t * dim + d];
      const double off = value - args.output[row * dim + d];
      const double focal_off = value - focal[d];
      squares += share[t] * off * off;
      focal_squares += share[t] * share[t] * focal_off * focal_off;
    }
  }
  args.spread[row] = {.each = static_cast<float>(std::sqrt(squares) * kAbove),
                      .focus = static_cast<float>(focus * kAbove),
                      .focal = static_cast<float>(std::sqrt(focal_squares) * kAbove)};
}

}  // namespace

void CheckSpread(const SpreadArgs& args) {
  EBBTIDE_CHECK(args.head_dim >= 1 && args.head_dim <= kHeadDimMax, "spread: head_dim is 1 to 256");
  EBBTIDE_CHECK(args.tokens >= 1 && args.tokens <= kPageTokensMax, "spread: 1 to 64 tokens");
  EBBTIDE_CHECK(args.rows >= 0, "spread: rows is not negative");
  const auto rows = static_cast<size_t>(args.rows);
  const auto tokens = static_cast<size_t>(args.tokens);
  const auto dim = static_cast<size_t>(args.head_dim);
  EBBTIDE_CHECK(args.value.size() == tokens * dim, "spread: value is [tokens, head_dim]");
  EBBTIDE_CHECK(args.logits.size() == rows * tokens, "spread: logits is [rows, tokens]");
  EBBTIDE_CHECK(args.lse.size() == rows && args.spread.size() == rows,
                "spread: lse and spread are [rows]");
  EBBTIDE_CHECK(args.output.size() == rows * dim && args.focal_output.size() == rows * dim,
                "spread: output and focal_output are [rows, head_dim]");
}

void SpreadReference(const SpreadArgs& args) {
  CheckSpread(args);
  for (size_t row = 0; row < static_cast<size_t>(args.rows); ++row) SpreadRow(args, row);
}

}  // namespace ebbtide::gpu
