// SPDX-License-Identifier: Apache-2.0
//
// The bounds of absent tokens, page by page in f64. Every result is moved outward by far more than
// f64 arithmetic is off (kF64Slack of what could add up), then rounded outward to f32.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>

#include "base/status_macros.h"
#include "gpu/element.h"
#include "gpu/kernels/bound.h"
#include "gpu/kernels/digest.h"
#include "gpu/outward.h"

namespace ebbtide::gpu {
namespace {

constexpr double kF64Slack = 1e-12;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

double Norm(std::span<const float> x) {
  double sum = 0;
  for (const float element : x) sum += static_cast<double>(element) * element;
  return std::sqrt(sum);
}

// ln of the mean of e^z over any z in [a, b] whose mean is at most t: largest when every z lies at
// one end. Written so that nothing cancels and e^-w cannot overflow.
double Chord(double a, double b, double t) {
  const double width = b - a;
  if (!(width > 0 && width < kInfinity)) return b;
  const double share_at_b = std::clamp((t - a) / width, 0.0, 1.0);
  return b + std::log(std::max(share_at_b + (1 - share_at_b) * std::exp(-width), 1e-300));
}

struct Bracket {
  double low = 0;
  double high = 0;
};

// Where the logits of a page's tokens can lie, by its box and by the largest norm of a key.
Bracket LogitBracket(std::span<const float> query, float scale, const DigestView& digest) {
  double low = 0;
  double high = 0;
  for (size_t d = 0; d < query.size(); ++d) {
    const double q = static_cast<double>(scale) * query[d];
    if (q == 0) continue;  // The box may be infinite; the key is not.
    const double at_low = q * HalfToFloat(digest.key_low[d]);
    const double at_high = q * HalfToFloat(digest.key_high[d]);
    low += std::min(at_low, at_high);
    high += std::max(at_low, at_high);
  }
  const double norms = std::fabs(scale) * Norm(query) * digest.tail.key_norm_max;
  return {std::max(low, -norms) - kF64Slack * norms, std::min(high, norms) + kF64Slack * norms};
}

struct Mean {
  double logit = 0;
  double open = 0;  // The exact mean is no further away.
};

Mean AbsentMean(const BoundArgs& args, size_t r, size_t p) {
  const auto dim = static_cast<size_t>(args.head_dim);
  const std::span<const float> query = args.query.subspan(r * dim, dim);
  const DigestView digest(args.digest[p], args.head_dim);
  const double size = std::fabs(args.scale) * Norm(query);
  double mean = 0;
  for (size_t d = 0; d < dim; ++d) {
    mean += static_cast<double>(args.scale) * query[d] * HalfToFloat(digest.key_mean[d]);
  }
  double sum = digest.tail.tokens * mean;
  double open = digest.tail.tokens *
                (size * digest.tail.key_mean_error + kF64Slack * size * digest.tail.key_norm_max);
  const int resident = digest.tail.tokens - args.absent[p];
  if (resident > 0) {
    const double known = args.resident_logit_sum[r * static_cast<size_t>(args.pages) + p];
    const double error = args.resident_logit_error.empty() ? 0 : args.resident_logit_error[r];
    sum -= known;
    open += resident * error + 0x1p-24 * std::fabs(known) + 0x1p-149;
  }
  return {.logit = sum / args.absent[p], .open = open / args.absent[p]};
}

void BoundOne(const BoundArgs& args, size_t r, size_t p) {
  const auto dim = static_cast<size_t>(args.head_dim);
  CheckAbsent(args, p, DigestView(args.digest[p], args.head_dim).tail.tokens);
  const auto [lowest, highest] = LogitBracket(args.query.subspan(r * dim, dim), args.scale,
                                              DigestView(args.digest[p], args.head_dim));
  const Mean mean = AbsentMean(args, r, p);
  const double count = std::log(args.absent[p]);
  const double slack = kF64Slack * (1 + std::max(std::fabs(lowest), std::fabs(highest)));
  const double jensen = std::max(lowest, mean.logit - mean.open);
  const double chord = Chord(lowest, highest, std::min(highest, mean.logit + mean.open));
  const double low = count + jensen - slack;
  const double high = count + chord + slack;

  const size_t i = r * static_cast<size_t>(args.pages) + p;
  args.mass_low[i] = std::isnan(low) ? -INFINITY : FloatDown(low);
  args.mass_high[i] = std::isnan(high) ? INFINITY : FloatUp(high);
  args.mass_estimate[i] = static_cast<float>(count + std::clamp(mean.logit, lowest, highest));
}

}  // namespace

void CheckBound(const BoundArgs& args) {
  EBBTIDE_CHECK(args.head_dim >= 1 && args.head_dim <= kHeadDimMax, "bound: head_dim is 1 to 256");
  EBBTIDE_CHECK(args.rows >= 0 && args.pages >= 0, "bound: rows and pages are not negative");
  const auto rows = static_cast<size_t>(args.rows);
  const auto pages = static_cast<size_t>(args.pages);
  EBBTIDE_CHECK(args.query.size() == rows * static_cast<size_t>(args.head_dim),
                "bound: query is [rows, head_dim]");
  EBBTIDE_CHECK(args.digest.size() == pages && args.absent.size() == pages,
                "bound: digest and absent are [pages]");
  EBBTIDE_CHECK(args.resident_logit_error.empty() || args.resident_logit_error.size() == rows,
                "bound: resident_logit_error is [rows] or empty");
  EBBTIDE_CHECK(args.resident_logit_sum.empty() || args.resident_logit_sum.size() == rows * pages,
                "bound: resident_logit_sum is [rows, pages] or empty");
  EBBTIDE_CHECK(args.mass_low.size() == rows * pages && args.mass_high.size() == rows * pages &&
                    args.mass_estimate.size() == rows * pages,
                "bound: mass_low, mass_high and mass_estimate are [rows, pages]");
}

void CheckAbsent(const BoundArgs& args, size_t p, int32_t tokens) {
  EBBTIDE_CHECK(args.absent[p] >= 1 && args.absent[p] <= tokens,
                "bound: absent is 1 to the tokens of its page");
  EBBTIDE_CHECK(args.absent[p] == tokens || !args.resident_logit_sum.empty(),
                "bound: a page has resident tokens but no resident_logit_sum");
}

void BoundReference(const BoundArgs& args) {
  CheckBound(args);
  for (size_t r = 0; r < static_cast<size_t>(args.rows); ++r) {
    for (size_t p = 0; p < static_cast<size_t>(args.pages); ++p) BoundOne(args, r, p);
  }
}

void CheckValueDistance(const ValueDistanceArgs& args) {
  EBBTIDE_CHECK(args.head_dim >= 1 && args.head_dim <= kHeadDimMax,
                "value distance: head_dim is 1 to 256");
  EBBTIDE_CHECK(args.rows >= 0 && args.pages >= 0, "value distance: rows, pages are not negative");
  const auto rows = static_cast<size_t>(args.rows);
  const auto pages = static_cast<size_t>(args.pages);
  EBBTIDE_CHECK(args.output.size() == rows * static_cast<size_t>(args.head_dim),
                "value distance: output is [rows, head_dim]");
  EBBTIDE_CHECK(args.digest.size() == pages, "value distance: digest is [pages]");
  EBBTIDE_CHECK(args.distance.size() == rows * pages, "value distance: distance is [rows, pages]");
}

void ValueDistanceReference(const ValueDistanceArgs& args) {
  CheckValueDistance(args);
  const auto dim = static_cast<size_t>(args.head_dim);
  for (size_t r = 0; r < static_cast<size_t>(args.rows); ++r) {
    const std::span<const float> output = args.output.subspan(r * dim, dim);
    for (size_t p = 0; p < static_cast<size_t>(args.pages); ++p) {
      const DigestView digest(args.digest[p], args.head_dim);
      double sum = 0;
      for (size_t d = 0; d < dim; ++d) {
        const double difference =
            static_cast<double>(HalfToFloat(digest.value_mean[d])) - output[d];
        sum += difference * difference;
      }
      const double distance = std::min(std::sqrt(sum) + digest.tail.value_radius,
                                       Norm(output) + digest.tail.value_norm_max);
      args.distance[r * static_cast<size_t>(args.pages) + p] = FloatUp(distance * (1 + kF64Slack));
    }
  }
}

}  // namespace ebbtide::gpu
