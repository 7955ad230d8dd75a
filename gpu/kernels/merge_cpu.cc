// SPDX-License-Identifier: Apache-2.0
//
// The merge of two partial attentions: a few exponentials a row, then one pass over its channels.

#include "gpu/kernels/merge.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/merge_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/status_macros.h"
#include "gpu/cpu/merge_row.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// No fused multiply-add, which not every target has.
void MergeChannels(const JoinedRow& joined, std::span<const float> part, std::span<float> output) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> f32;
  const auto weight = hn::Set(d, joined.weight);
  const auto part_weight = hn::Set(d, joined.part_weight);
  size_t i = 0;
  for (; i + hn::Lanes(d) <= output.size(); i += hn::Lanes(d)) {
    const auto mine = hn::PromoteTo(d, hn::LoadU(f32, &output[i]));
    const auto theirs = hn::PromoteTo(d, hn::LoadU(f32, &part[i]));
    const auto sum = hn::Add(hn::Mul(weight, mine), hn::Mul(part_weight, theirs));
    hn::StoreU(hn::DemoteTo(f32, sum), f32, &output[i]);
  }
  for (; i < output.size(); ++i) {
    const double mine = joined.weight * static_cast<double>(output[i]);
    output[i] = static_cast<float>(mine + joined.part_weight * static_cast<double>(part[i]));
  }
}

}  // namespace ebbtide::gpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {
namespace {

HWY_EXPORT(MergeChannels);

}  // namespace

JoinedRow JoinRow(double lse, double part_lse) {
  if (part_lse == -std::numeric_limits<double>::infinity()) return {.lse = lse};
  const double largest = std::max(lse, part_lse);
  const double mass = std::exp(lse - largest);
  const double part_mass = std::exp(part_lse - largest);
  return {.weight = mass / (mass + part_mass),
          .part_weight = part_mass / (mass + part_mass),
          .lse = largest + std::log(mass + part_mass)};
}

void MergeRow(const JoinedRow& joined, std::span<const float> part, std::span<float> output) {
  if (joined.part_weight == 0) return;
  HWY_DYNAMIC_DISPATCH(MergeChannels)(joined, part, output);
}

void MergeCpu(const MergeArgs& args) {
  CheckMerge(args);
  const size_t head_dim = static_cast<size_t>(args.head_dim);
  for (size_t row = 0; row < args.lse.size(); ++row) {
    const JoinedRow joined = JoinRow(args.lse[row], args.part_lse[row]);
    MergeRow(joined, args.part_output.subspan(row * head_dim, head_dim),
             args.output.subspan(row * head_dim, head_dim));
    args.lse[row] = static_cast<float>(joined.lse);
  }
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
