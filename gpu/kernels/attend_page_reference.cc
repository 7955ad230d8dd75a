// SPDX-License-Identifier: Apache-2.0
//
// A row at a time in f64; spreads rounded up once.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "base/status_macros.h"
#include "gpu/kernels/attend_page.h"

namespace ebbtide::gpu {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

// Above the rounding of shares and sums, here and in f32.
constexpr double kAbove = 1 + 1e-4;

class ReferenceRow {
 public:
  ReferenceRow(const AttendPageArgs& args, size_t row)
      : args_(args),
        row_(row),
        dim_(static_cast<size_t>(args.head_dim)),
        tokens_(static_cast<size_t>(args.tokens)),
        output_(args.output.subspan(row * dim_, dim_)),
        focal_(args.focal_output.subspan(row * dim_, dim_)) {}

  void Run() {
    const std::vector<double> logits = Logits();
    const double peak = *std::ranges::max_element(logits);
    std::ranges::fill(output_, 0.0F);
    std::ranges::fill(focal_, 0.0F);
    args_.spread[row_] = {};
    args_.lse[row_] = static_cast<float>(kNothing);
    if (peak == kNothing) return;
    double total = 0;
    std::vector<double> share;
    for (const double logit : logits) total += share.emplace_back(std::exp(logit - peak));
    for (double& each : share) each /= total;
    args_.lse[row_] = static_cast<float>(peak + std::log(total));
    Attend(share);
  }

 private:
  std::vector<double> Logits() const {
    std::vector<double> logits;
    for (size_t t = 0; t < tokens_; ++t) {
      double dot = 0;
      for (size_t d = 0; d < dim_; ++d)
        dot += static_cast<double>(args_.query[row_ * dim_ + d]) * args_.page[t * dim_ + d];
      const bool is_seen = (args_.visible[row_] >> t & 1) != 0;
      const auto logit = static_cast<float>(is_seen ? args_.scale * dot : kNothing);
      logits.push_back(logit);
      if (!args_.logits.empty()) args_.logits[row_ * tokens_ + t] = logit;
    }
    return logits;
  }

  double Value(size_t t, size_t d) const { return args_.page[(tokens_ + t) * dim_ + d]; }

  void Attend(const std::vector<double>& share) {
    double focus = 0;
    for (const double p : share) focus += p * p;
    for (size_t d = 0; d < dim_; ++d) {
      double sum = 0;
      double focal_sum = 0;
      for (size_t t = 0; t < tokens_; ++t) {
        sum += share[t] * Value(t, d);
        focal_sum += share[t] * share[t] * Value(t, d);
      }
      output_[d] = static_cast<float>(sum);
      focal_[d] = static_cast<float>(focal_sum / focus);
    }
    double squares = 0;
    double focal_squares = 0;
    for (size_t t = 0; t < tokens_; ++t) {
      for (size_t d = 0; d < dim_; ++d) {
        const double off = Value(t, d) - output_[d];
        const double focal_off = Value(t, d) - focal_[d];
        squares += share[t] * off * off;
        focal_squares += share[t] * share[t] * focal_off * focal_off;
      }
    }
    args_.spread[row_] = {.each = static_cast<float>(std::sqrt(squares) * kAbove),
                          .focus = static_cast<float>(focus * kAbove),
                          .focal = static_cast<float>(std::sqrt(focal_squares) * kAbove)};
  }

  const AttendPageArgs& args_;
  const size_t row_;
  const size_t dim_;
  const size_t tokens_;
  const std::span<float> output_;
  const std::span<float> focal_;
};

}  // namespace

void CheckAttendPage(const AttendPageArgs& args) {
  EBBTIDE_CHECK(args.head_dim >= 1 && args.head_dim <= kHeadDimMax,
                "attend page: head_dim is 1 to 256");
  EBBTIDE_CHECK(args.tokens >= 1 && args.tokens <= kPageTokensMax, "attend page: 1 to 64 tokens");
  EBBTIDE_CHECK(args.rows >= 0, "attend page: rows is not negative");
  const auto rows = static_cast<size_t>(args.rows);
  const auto tokens = static_cast<size_t>(args.tokens);
  const auto dim = static_cast<size_t>(args.head_dim);
  EBBTIDE_CHECK(args.page.size() == 2 * tokens * dim,
                "attend page: page is [K tokens x d][V tokens x d]");
  EBBTIDE_CHECK(args.query.size() == rows * dim, "attend page: query is [rows, head_dim]");
  EBBTIDE_CHECK(
      args.visible.size() == rows && args.lse.size() == rows && args.spread.size() == rows,
      "attend page: visible, lse and spread are [rows]");
  EBBTIDE_CHECK(args.output.size() == rows * dim && args.focal_output.size() == rows * dim,
                "attend page: output and focal_output are [rows, head_dim]");
  EBBTIDE_CHECK(args.logits.empty() || args.logits.size() == rows * tokens,
                "attend page: logits is [rows, tokens] or empty");
}

void AttendPageReference(const AttendPageArgs& args) {
  CheckAttendPage(args);
  for (size_t row = 0; row < static_cast<size_t>(args.rows); ++row) ReferenceRow(args, row).Run();
}

}  // namespace ebbtide::gpu
