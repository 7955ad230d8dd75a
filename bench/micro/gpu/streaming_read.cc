// SPDX-License-Identifier: Apache-2.0

#include "bench/micro/gpu/streaming_read.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/micro/gpu/streaming_read.cc"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace ebbtide::bench::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

uint64_t Read(std::span<const std::byte> bytes) {
  const hn::ScalableTag<uint64_t> d;
  constexpr size_t kVectors = 8;
  const size_t lanes = hn::Lanes(d);
  const size_t step = kVectors * lanes;
  const auto* words = reinterpret_cast<const uint64_t*>(bytes.data());
  const size_t count = bytes.size() / sizeof(uint64_t) / step * step;
  auto a = hn::Zero(d);
  auto b = hn::Zero(d);
  for (size_t i = 0; i < count; i += step) {
    for (size_t byte = 0; byte < step * sizeof(uint64_t); byte += 64) {
      hwy::Prefetch(bytes.data() + i * sizeof(uint64_t) + 4096 + byte);
    }
    for (size_t v = 0; v < kVectors; v += 2) {
      a = hn::Xor(a, hn::LoadU(d, words + i + v * lanes));
      b = hn::Xor(b, hn::LoadU(d, words + i + (v + 1) * lanes));
    }
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Xor(a, b)));
}

}  // namespace ebbtide::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ebbtide::bench {
namespace {
HWY_EXPORT(Read);
}  // namespace

uint64_t StreamingRead(std::span<const std::byte> bytes) {
  return HWY_DYNAMIC_DISPATCH(Read)(bytes);
}

}  // namespace ebbtide::bench
#endif  // HWY_ONCE
