// SPDX-License-Identifier: Apache-2.0
//
// Selection over 64-bit keys, ordered score above ordered index, so that one integer comparison is
// the whole order. Keys differ, so the largest that leaves divides those that leave from those that
// stay.

#include "gpu/kernels/select.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "base/status_macros.h"

namespace ebbtide::gpu {
namespace {

// Grows with the score; -0 and +0 are the same number and get the same bits.
uint32_t OrderedScore(float score) {
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0F);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

uint64_t Key(float score, int32_t index) {
  const uint32_t ordered_index = static_cast<uint32_t>(index) ^ 0x80000000U;
  return (static_cast<uint64_t>(OrderedScore(score)) << 32) | ordered_index;
}

}  // namespace

std::vector<int32_t> SelectCpu(const SelectArgs& args) {
  EBBTIDE_CHECK(args.index.size() == args.score.size(), "select: index is [tokens]");
  EBBTIDE_CHECK(args.eligible.size() == args.score.size(), "select: eligible is [tokens]");
  std::vector<uint64_t> keys;
  keys.reserve(args.score.size());
  for (size_t token = 0; token < args.score.size(); ++token) {
    if (args.eligible[token] == 0) continue;
    EBBTIDE_CHECK(!std::isnan(args.score[token]), "select: a score is NaN");
    keys.push_back(Key(args.score[token], args.index[token]));
  }
  const size_t count = std::min(args.count, keys.size());
  if (count == 0) return {};
  const auto last = keys.begin() + static_cast<ptrdiff_t>(count) - 1;
  std::nth_element(keys.begin(), last, keys.end());

  std::vector<std::pair<uint64_t, int32_t>> leaving;
  leaving.reserve(count);
  for (size_t token = 0; token < args.score.size(); ++token) {
    if (args.eligible[token] == 0) continue;
    const uint64_t key = Key(args.score[token], args.index[token]);
    if (key <= *last) leaving.emplace_back(key, static_cast<int32_t>(token));
  }
  std::sort(leaving.begin(), leaving.end());
  std::vector<int32_t> order(count);
  std::transform(leaving.begin(), leaving.end(), order.begin(),
                 [](const auto& leaver) { return leaver.second; });
  return order;
}

}  // namespace ebbtide::gpu
