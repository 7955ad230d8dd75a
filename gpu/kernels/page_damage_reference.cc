// SPDX-License-Identifier: Apache-2.0
//
// Page CAOTE as its formula has it, a page and a row at a time in float64.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "base/status_macros.h"
#include "gpu/kernels/page_damage.h"
#include "gpu/shape.h"

namespace ebbtide::gpu {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

std::span<const float> Row(std::span<const float> array, size_t row, int head_dim) {
  const auto dim = static_cast<size_t>(head_dim);
  return array.subspan(row * dim, dim);
}

template <class Point>
double Distance(const Point& from, std::span<const float> to) {
  double sum = 0;
  for (size_t d = 0; d < to.size(); ++d) {
    const double off = static_cast<double>(from[d]) - to[d];
    sum += off * off;
  }
  return std::sqrt(sum);
}

// Attention of row r over the rest and all pages but `left_out`.
std::vector<double> OutputWithout(const PageDamageArgs& args, size_t r, size_t left_out) {
  const auto rows = static_cast<size_t>(args.rows);
  const auto pages = static_cast<size_t>(args.pages);
  const bool has_rest = !args.rest_lse.empty();
  double peak = has_rest ? args.rest_lse[r] : kMinusInfinity;
  for (size_t p = 0; p < pages; ++p) {
    if (p != left_out) peak = std::max<double>(peak, args.part_lse[p * rows + r]);
  }
  std::vector<double> output(static_cast<size_t>(args.head_dim), 0.0);
  if (peak == kMinusInfinity) return output;

  double total = 0;
  const auto add = [&](double lse, std::span<const float> part) {
    const double weight = std::exp(lse - peak);
    if (weight == 0) return;  // Its output may be anything.
    total += weight;
    for (size_t d = 0; d < output.size(); ++d) output[d] += weight * part[d];
  };
  for (size_t p = 0; p < pages; ++p) {
    const size_t part = p * rows + r;
    if (p != left_out) add(args.part_lse[part], Row(args.part_output, part, args.head_dim));
  }
  if (has_rest) add(args.rest_lse[r], Row(args.rest_output, r, args.head_dim));
  for (double& x : output) x /= total;
  return output;
}

// Whether another page draws as much from the row.
bool HasEqual(const PageDamageArgs& args, size_t p, size_t r) {
  const auto rows = static_cast<size_t>(args.rows);
  for (size_t other = 0; other < static_cast<size_t>(args.pages); ++other) {
    if (other != p && args.part_lse[other * rows + r] == args.part_lse[p * rows + r]) return true;
  }
  return false;
}

double RowDamage(const PageDamageArgs& args, size_t p, size_t r) {
  const size_t place = p * static_cast<size_t>(args.rows) + r;
  const std::span<const float> part = Row(args.part_output, place, args.head_dim);
  const double x = static_cast<double>(args.part_lse[place]) - static_cast<double>(args.lse[r]);
  const double share = std::min(1.0, std::exp(x));
  if (share > 0.5 && !HasEqual(args, p, r))
    return share * Distance(OutputWithout(args, r, p), part);
  const double odds = share > 0.5 ? 1 : share / -std::expm1(x);
  return odds * Distance(Row(args.output, r, args.head_dim), part);
}

}  // namespace

void CheckPageDamage(const PageDamageArgs& args) {
  EBBTIDE_CHECK(args.head_dim >= 1 && args.head_dim <= kHeadDimMax,
                "page damage: head_dim is 1 to 256");
  EBBTIDE_CHECK(args.rows >= 1 && args.pages >= 0,
                "page damage: there is at least one row, and pages is not negative");
  const auto rows = static_cast<size_t>(args.rows);
  const auto parts = static_cast<size_t>(args.pages) * rows;
  const auto dim = static_cast<size_t>(args.head_dim);
  EBBTIDE_CHECK(args.part_lse.size() == parts, "page damage: part_lse is [pages, rows]");
  EBBTIDE_CHECK(args.part_output.size() == parts * dim,
                "page damage: part_output is [pages, rows, head_dim]");
  EBBTIDE_CHECK(args.lse.size() == rows, "page damage: lse is [rows]");
  EBBTIDE_CHECK(args.output.size() == rows * dim, "page damage: output is [rows, head_dim]");
  EBBTIDE_CHECK(args.rest_lse.empty() || args.rest_lse.size() == rows,
                "page damage: rest_lse is [rows] or empty");
  EBBTIDE_CHECK(args.rest_output.size() == args.rest_lse.size() * dim,
                "page damage: rest_output is [rows, head_dim], or empty with rest_lse");
  EBBTIDE_CHECK(args.damage.size() == static_cast<size_t>(args.pages),
                "page damage: damage is [pages]");
}

void PageDamageReference(const PageDamageArgs& args) {
  CheckPageDamage(args);
  for (size_t p = 0; p < args.damage.size(); ++p) {
    double sum = 0;
    for (size_t r = 0; r < args.lse.size(); ++r) {
      const float part_lse = args.part_lse[p * args.lse.size() + r];
      if (args.lse[r] == kMinusInfinity || part_lse == kMinusInfinity) continue;
      const double damage = RowDamage(args, p, r);
      sum += damage * damage;
    }
    args.damage[p] =
        static_cast<float>(std::min<double>(std::sqrt(sum), std::numeric_limits<float>::max()));
  }
}

}  // namespace ebbtide::gpu
