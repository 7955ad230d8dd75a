// SPDX-License-Identifier: Apache-2.0
//
// Comparisons in float64. A NaN anywhere is a violation, never a pass.

#include "client/cli/judge.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_format.h"

namespace ebbtide::cli {
namespace {

constexpr double kRounding = 0x1p-24;  // Half a unit in the last place of an f32 around 1.

absl::Status CheckSizes(const LayerTruth& truth, uint64_t count,
                        const client::AttendResult& result) {
  const size_t rows = count * truth.query_heads;
  const auto& certificate = result.certificate;
  if (result.output.f32().size() == rows * truth.head_dim && result.lse.size() == rows &&
      certificate.error_bound.size() == rows && certificate.mass_bound.size() == rows &&
      certificate.met.size() == count) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrFormat(
      "answer to %u queries of %u heads of %u channels has %u f32 outputs, %u lse, %u error "
      "bounds, "
      "%u mass bounds, %u met",
      count, truth.query_heads, truth.head_dim, result.output.f32().size(), result.lse.size(),
      certificate.error_bound.size(), certificate.mass_bound.size(), certificate.met.size()));
}

// 0 / 0 is no error; NaN is the worst there is.
double Ratio(double error, double size) {
  if (error == 0) return 0;
  const double ratio = error / size;
  return std::isnan(ratio) ? std::numeric_limits<double>::infinity() : ratio;
}

// The least mass that the answer's lse proves to be left out: what f32 sums and the lse's own
// rounding may have taken away is granted.
double ProvenMass(double lse, double lse_full, double logit_slack, uint64_t tokens) {
  const double slack = logit_slack + static_cast<double>(tokens) * kRounding +
                       16 * kRounding * std::max(1.0, std::fabs(lse));
  return -std::expm1(lse + slack - lse_full);
}

// Pages attended in a low-bit form count with about their mass: then the lse proves nothing about
// what was left out.
bool HasForms(const client::AttendResult& result) {
  return std::any_of(result.touched.begin(), result.touched.end(),
                     [](const client::TouchedRung& touched) {
                       return touched.rung == "coarse" || touched.rung == "fine";
                     });
}

TokenVerdict JudgeToken(const LayerTruth& truth, uint64_t token, size_t first_row,
                        const client::AttendResult& result) {
  TokenVerdict verdict;
  const std::span<const float> output = result.output.f32();
  double error2_sum = 0, bound2_sum = 0, size2_sum = 0;
  for (uint32_t head = 0; head < truth.query_heads; ++head) {
    const size_t row = first_row + head;
    const std::span<const double> full = truth.Output(token, head);
    double error2 = 0, size2 = 0;
    for (size_t d = 0; d < full.size(); ++d) {
      const double difference = double{output[row * truth.head_dim + d]} - full[d];
      error2 += difference * difference;
      size2 += full[d] * full[d];
    }
    error2_sum += error2;
    size2_sum += size2;
    const double error = std::sqrt(error2);
    const double bound = result.certificate.error_bound[row];
    bound2_sum += bound * bound;
    verdict.worst_head_rel_error =
        std::max(verdict.worst_head_rel_error, Ratio(error, std::sqrt(size2)));
    if (!(error <= bound)) ++verdict.error_violations;
    if (error > 0) verdict.bound_over_error.push_back(bound / error);
    if (HasForms(result)) continue;
    const size_t at = token * truth.query_heads + head;
    const double mass =
        ProvenMass(result.lse[row], truth.lse[at], truth.logit_slack[at], token + 1);
    if (!(mass <= result.certificate.mass_bound[row])) ++verdict.mass_violations;
  }
  verdict.certified_rel_error = Ratio(std::sqrt(bound2_sum), std::sqrt(size2_sum));
  verdict.rel_error = Ratio(std::sqrt(error2_sum), std::sqrt(size2_sum));
  return verdict;
}

}  // namespace

absl::StatusOr<std::vector<TokenVerdict>> Judge(const LayerTruth& truth, uint64_t first,
                                                uint64_t count,
                                                const client::AttendResult& result) {
  if (absl::Status sizes = CheckSizes(truth, count, result); !sizes.ok()) return sizes;
  std::vector<TokenVerdict> verdicts;
  verdicts.reserve(count);
  for (uint64_t i = 0; i < count; ++i) {
    verdicts.push_back(JudgeToken(truth, first + i, i * truth.query_heads, result));
  }
  return verdicts;
}

Summary Summarise(std::vector<double> numbers) {
  if (numbers.empty()) return {};
  std::sort(numbers.begin(), numbers.end());
  const auto rank = [&](double share) {
    const double at = std::ceil(share * static_cast<double>(numbers.size())) - 1;
    return numbers[static_cast<size_t>(std::max(0.0, at))];
  };
  return {.mean = std::accumulate(numbers.begin(), numbers.end(), 0.0) /
                  static_cast<double>(numbers.size()),
          .p50 = rank(0.5),
          .p99 = rank(0.99),
          .max = numbers.back(),
          .count = numbers.size()};
}

}  // namespace ebbtide::cli
