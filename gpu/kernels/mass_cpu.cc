// SPDX-License-Identifier: Apache-2.0
//
// Attention drawn by each slot, a block of slots at a time: the block's f64 sums stay in the
// first-level cache while all rows of logits pass over them, each read in order.

#include "gpu/kernels/mass.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "gpu/kernels/mass_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <limits>

#include "gpu/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ebbtide::gpu {
namespace HWY_NAMESPACE {

// sum[s] += e^(logits[s] - lse)
void AddWeights(std::span<const float> logits, float lse, double* sum) {
  const FloatTag d;
  const hn::Half<FloatTag> half;
  const hn::Rebind<double, decltype(half)> wide;
  constexpr size_t kHalf = static_cast<size_t>(kLanes) / 2;
  const Floats shift = hn::Set(d, lse);
  const auto add = [&](Floats logit, double* to) HWY_ATTR {
    const Floats weight = Exp(hn::Sub(logit, shift));
    const auto low = hn::PromoteTo(wide, hn::LowerHalf(half, weight));
    const auto high = hn::PromoteTo(wide, hn::UpperHalf(half, weight));
    hn::StoreU(hn::Add(hn::LoadU(wide, to), low), wide, to);
    hn::StoreU(hn::Add(hn::LoadU(wide, to + kHalf), high), wide, to + kHalf);
  };
  size_t s = 0;
  for (; s + 2 * kHalf <= logits.size(); s += 2 * kHalf) {
    add(hn::LoadU(d, &logits[s]), sum + s);
  }
  if (s < logits.size()) {  // `sum` has room for whole vectors.
    add(WidenTail(&logits[s], static_cast<int>(logits.size() - s)), sum + s);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace ebbtide::gpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::gpu {
namespace {

HWY_EXPORT(AddWeights);

constexpr size_t kBlockSlots = 512;  // 4 KiB of sums.

}  // namespace

void MassCpu(const MassArgs& args) {
  CheckMass(args);
  const size_t slots = args.mass.size();
  alignas(64) std::array<double, kBlockSlots> sum;
  for (size_t first = 0; first < slots; first += kBlockSlots) {
    const size_t count = std::min(kBlockSlots, slots - first);
    sum.fill(0);
    for (size_t row = 0; row < args.lse.size(); ++row) {
      if (args.lse[row] == -std::numeric_limits<float>::infinity()) continue;
      HWY_DYNAMIC_DISPATCH(AddWeights)
      (args.logits.subspan(row * slots + first, count), args.lse[row], sum.data());
    }
    for (size_t s = 0; s < count; ++s) args.mass[first + s] += sum[s] / args.group;
  }
}

}  // namespace ebbtide::gpu
#endif  // HWY_ONCE
