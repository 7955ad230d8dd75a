// SPDX-License-Identifier: Apache-2.0
//
// What a page leaves behind, worked out in f64 and rounded once, outward, when it is stored.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "base/status_macros.h"
#include "gpu/element.h"
#include "gpu/kernels/digest.h"
#include "gpu/outward.h"

namespace ebbtide::gpu {
namespace {

// Far more than f64 arithmetic over a page is off, far less than an f32 step.
constexpr double kF64Slack = 1 + 1e-12;

using Table = std::vector<std::vector<double>>;  // [tokens][head_dim]

Table Read(const DigestArgs& args, size_t offset) {
  Table rows(static_cast<size_t>(args.tokens));
  for (size_t j = 0; j < rows.size(); ++j) {
    const std::byte* row = args.page.data() + offset + j * args.shape.row_bytes();
    for (int d = 0; d < args.shape.head_dim; ++d) {
      rows[j].push_back(ElementAt(args.shape.dtype, row, d));
    }
  }
  return rows;
}

double Norm(const std::vector<double>& x) {
  double sum = 0;
  for (const double element : x) sum += element * element;
  return std::sqrt(sum);
}

double Distance(const std::vector<double>& x, const std::vector<double>& y) {
  double sum = 0;
  for (size_t d = 0; d < x.size(); ++d) sum += (x[d] - y[d]) * (x[d] - y[d]);
  return std::sqrt(sum);
}

std::vector<double> Mean(const Table& rows) {
  std::vector<double> mean(rows[0].size(), 0.0);
  for (const auto& row : rows) {
    for (size_t d = 0; d < mean.size(); ++d) mean[d] += row[d];
  }
  for (double& x : mean) x /= static_cast<double>(rows.size());
  return mean;
}

std::vector<double> StoreMean(const std::vector<double>& mean, uint16_t* stored) {
  std::vector<double> as_stored;
  for (size_t d = 0; d < mean.size(); ++d) {
    stored[d] = HalfNearest(mean[d]);
    as_stored.push_back(HalfToFloat(stored[d]));
  }
  return as_stored;
}

}  // namespace

void CheckDigest(const DigestArgs& args) {
  EBBTIDE_CHECK(args.shape.head_dim >= 1 && args.shape.head_dim <= kHeadDimMax,
                "digest: head_dim is 1 to 256");
  EBBTIDE_CHECK(args.shape.tokens <= kPageTokensMax, "digest: a page has at most 64 tokens");
  EBBTIDE_CHECK(args.tokens >= 1 && args.tokens <= args.shape.tokens,
                "digest: tokens is 1 to the tokens of a page");
  EBBTIDE_CHECK(args.page.size() == args.shape.page_bytes(), "digest: page is one page long");
  EBBTIDE_CHECK(args.digest.size() == DigestBytes(args.shape.head_dim),
                "digest: digest is DigestBytes(head_dim) long");
}

void DigestReference(const DigestArgs& args) {
  CheckDigest(args);
  const Table key = Read(args, 0);
  const Table value = Read(args, args.shape.half_bytes());
  const auto dim = static_cast<size_t>(args.shape.head_dim);
  auto* const key_low = reinterpret_cast<uint16_t*>(args.digest.data());
  uint16_t* const key_high = key_low + dim;
  uint16_t* const key_mean = key_high + dim;
  uint16_t* const value_mean = key_mean + dim;

  for (size_t d = 0; d < dim; ++d) {
    double low = key[0][d];
    double high = key[0][d];
    for (const auto& row : key) {
      low = std::min(low, row[d]);
      high = std::max(high, row[d]);
    }
    key_low[d] = HalfDown(low);
    key_high[d] = HalfUp(high);
  }
  const std::vector<double> exact_key_mean = Mean(key);
  const std::vector<double> stored_key_mean = StoreMean(exact_key_mean, key_mean);
  const std::vector<double> stored_value_mean = StoreMean(Mean(value), value_mean);

  double key_norm = 0;
  double value_norm = 0;
  double value_radius = 0;
  for (size_t j = 0; j < key.size(); ++j) {
    key_norm = std::max(key_norm, Norm(key[j]));
    value_norm = std::max(value_norm, Norm(value[j]));
    value_radius = std::max(value_radius, Distance(value[j], stored_value_mean));
  }
  // The mean's own rounding in f64, for means far smaller than what they are means of.
  const double mean_error = Distance(stored_key_mean, exact_key_mean) + (kF64Slack - 1) * key_norm;
  auto* const tail = reinterpret_cast<DigestTail*>(value_mean + dim);
  *tail = {.value_radius = FloatUp(value_radius * kF64Slack),
           .value_norm_max = FloatUp(value_norm * kF64Slack),
           .key_norm_max = FloatUp(key_norm * kF64Slack),
           .key_mean_error = FloatUp(mean_error * kF64Slack),
           .tokens = args.tokens,
           .reserved = 0};
}

}  // namespace ebbtide::gpu
