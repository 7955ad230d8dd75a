// SPDX-License-Identifier: Apache-2.0
//
// The formulas of CAOTE and FastCAOTE as plain loops in f64.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "base/status_macros.h"
#include "gpu/element.h"
#include "gpu/kernels/damage.h"

namespace ebbtide::gpu {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// The values of a lane as one table in f64; slots that hold nothing are left out.
struct Values {
  std::vector<size_t> slot;                // Where each one lies in logits and damage.
  std::vector<std::vector<double>> value;  // [token][head_dim]
  size_t slots = 0;
};

Values ReadValues(const std::span<const Extent> extents, Dtype dtype, int head_dim) {
  const auto dim = static_cast<size_t>(head_dim);
  Values all;
  for (const Extent& extent : extents) {
    for (size_t s = 0; s < static_cast<size_t>(extent.slots); ++s, ++all.slots) {
      if (extent.index[s] == kNoToken) continue;
      const std::byte* row = extent.value + s * dim * DtypeBytes(dtype);
      std::vector<double> value(dim);
      for (size_t d = 0; d < dim; ++d) value[d] = ElementAt(dtype, row, static_cast<int>(d));
      all.slot.push_back(all.slots);
      all.value.push_back(std::move(value));
    }
  }
  return all;
}

double Distance(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t d = 0; d < a.size(); ++d) sum += (a[d] - b[d]) * (a[d] - b[d]);
  return std::sqrt(sum);
}

std::vector<double> Row(std::span<const float> array, size_t r, int head_dim) {
  const auto row = array.subspan(r * static_cast<size_t>(head_dim), static_cast<size_t>(head_dim));
  return {row.begin(), row.end()};
}

// Attention of row r over all but token `left_out`, from the logits alone.
std::vector<double> OutputWithout(const DamageArgs& args, const Values& values, size_t r,
                                  size_t left_out) {
  const float* logits = args.logits.data() + r * values.slots;
  const bool has_rest = !args.rest_lse.empty();
  double peak = has_rest ? args.rest_lse[r] : kMinusInfinity;
  for (size_t t = 0; t < values.slot.size(); ++t) {
    if (t != left_out) peak = std::max<double>(peak, logits[values.slot[t]]);
  }
  std::vector<double> output(static_cast<size_t>(args.head_dim), 0.0);
  if (peak == kMinusInfinity) return output;

  double total = 0;
  const auto add = [&](double logit, const std::vector<double>& value) {
    const double weight = std::exp(logit - peak);
    total += weight;
    for (size_t d = 0; d < output.size(); ++d) output[d] += weight * value[d];
  };
  for (size_t t = 0; t < values.slot.size(); ++t) {
    if (t != left_out) add(logits[values.slot[t]], values.value[t]);
  }
  if (has_rest) add(args.rest_lse[r], Row(args.rest_output, r, args.head_dim));
  for (double& x : output) x /= total;
  return output;
}

double RowDamage(const DamageArgs& args, const Values& values, size_t r, size_t t) {
  const std::span<const float> logits = args.logits.subspan(r * values.slots, values.slots);
  const float logit = logits[values.slot[t]];
  const double x = static_cast<double>(logit) - static_cast<double>(args.lse[r]);
  const double a = std::min(1.0, std::exp(x));
  if (a > 0.5 && std::ranges::count(logits, logit) == 1) {
    return a * Distance(OutputWithout(args, values, r, t), values.value[t]);
  }
  const double odds = a > 0.5 ? 1 : a / -std::expm1(x);
  return odds * Distance(Row(args.centre, r, args.head_dim), values.value[t]);
}

double FastRowDamage(const DamageArgs& args, const Values& values, size_t r, size_t t) {
  const double x = static_cast<double>(args.logits[r * values.slots + values.slot[t]]) -
                   static_cast<double>(args.lse[r]);
  const double rest = std::max(-std::expm1(x), 0x1p-24);
  return std::exp(x) / rest * Distance(Row(args.centre, r, args.head_dim), values.value[t]);
}

template <class RowFunction>
void RootSumSquare(const DamageArgs& args, RowFunction row_damage) {
  const Values values = ReadValues(args.extents, args.dtype, args.head_dim);
  std::fill(args.damage.begin(), args.damage.end(), 0.0F);
  for (size_t t = 0; t < values.slot.size(); ++t) {
    double sum = 0;
    for (size_t r = 0; r < static_cast<size_t>(args.rows); ++r) {
      if (args.lse[r] == kMinusInfinity) continue;  // The row saw nothing.
      const double damage = row_damage(args, values, r, t);
      sum += damage * damage;
    }
    args.damage[values.slot[t]] =
        static_cast<float>(std::min<double>(std::sqrt(sum), std::numeric_limits<float>::max()));
  }
}

size_t CheckValues(std::span<const Extent> extents, int rows, int head_dim) {
  EBBTIDE_CHECK(head_dim >= 1 && head_dim <= kHeadDimMax, "damage: head_dim is 1 to 256");
  EBBTIDE_CHECK(rows >= 1, "damage: there is at least one row");
  size_t slots = 0;
  for (const Extent& extent : extents) {
    EBBTIDE_CHECK(extent.slots == 0 || (extent.value != nullptr && extent.index != nullptr),
                  "damage: an extent has slots but no memory");
    slots += static_cast<size_t>(extent.slots);
  }
  return slots;
}

}  // namespace

void CheckDamage(const DamageArgs& args) {
  const size_t slots = CheckValues(args.extents, args.rows, args.head_dim);
  const auto rows = static_cast<size_t>(args.rows);
  const auto dim = static_cast<size_t>(args.head_dim);
  EBBTIDE_CHECK(args.logits.size() == rows * slots, "damage: logits is [rows, slots]");
  EBBTIDE_CHECK(args.lse.size() == rows, "damage: lse is [rows]");
  EBBTIDE_CHECK(args.centre.size() == rows * dim, "damage: centre is [rows, head_dim]");
  EBBTIDE_CHECK(args.rest_lse.empty() || args.rest_lse.size() == rows,
                "damage: rest_lse is [rows] or empty");
  EBBTIDE_CHECK(args.rest_output.size() == args.rest_lse.size() * dim,
                "damage: rest_output is [rows, head_dim], or empty with rest_lse");
  EBBTIDE_CHECK(args.damage.size() == slots, "damage: damage is [slots]");
}

void CheckWeightedValue(const WeightedValueArgs& args) {
  const size_t slots = CheckValues(args.extents, args.rows, args.head_dim);
  const auto rows = static_cast<size_t>(args.rows);
  EBBTIDE_CHECK(args.weight.size() == rows * slots, "weighted value: weight is [rows, slots]");
  EBBTIDE_CHECK(args.output.size() == rows * static_cast<size_t>(args.head_dim),
                "weighted value: output is [rows, head_dim]");
}

void DamageReference(const DamageArgs& args) {
  RootSumSquare(args, RowDamage);
}

void FastDamageReference(const DamageArgs& args) {
  RootSumSquare(args, FastRowDamage);
}

void WeightedValueReference(const WeightedValueArgs& args) {
  CheckWeightedValue(args);
  const Values values = ReadValues(args.extents, args.dtype, args.head_dim);
  const auto dim = static_cast<size_t>(args.head_dim);
  for (size_t r = 0; r < static_cast<size_t>(args.rows); ++r) {
    for (size_t d = 0; d < dim; ++d) {
      double sum = 0;
      for (size_t t = 0; t < values.slot.size(); ++t) {
        sum += static_cast<double>(args.weight[r * values.slots + values.slot[t]]) *
               values.value[t][d];
      }
      args.output[r * dim + d] = static_cast<float>(sum);
    }
  }
}

}  // namespace ebbtide::gpu
