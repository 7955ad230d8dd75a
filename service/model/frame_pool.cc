// SPDX-License-Identifier: Apache-2.0

#include "service/model/frame_pool.h"

#include <algorithm>
#include <iterator>

#include "base/bytes.h"
#include "base/status_macros.h"

namespace ebbtide::service {

uint64_t FramePool::longest_run() const {
  uint64_t longest = 0;
  for (const auto& [offset, bytes] : free_) longest = std::max(longest, bytes);
  return longest;
}

std::optional<uint64_t> FramePool::Reserve(uint64_t bytes) {
  bytes = RoundUp(bytes, kAlignment);
  auto best = free_.end();
  for (auto run = free_.begin(); run != free_.end(); ++run) {
    if (run->second >= bytes && (best == free_.end() || run->second < best->second)) best = run;
  }
  if (best == free_.end()) return std::nullopt;

  const uint64_t offset = best->first;
  const uint64_t rest = best->second - bytes;
  free_.erase(best);
  if (rest > 0) free_.emplace(offset + bytes, rest);
  used_bytes_ += bytes;
  return offset;
}

void FramePool::Release(uint64_t offset, uint64_t bytes) {
  bytes = RoundUp(bytes, kAlignment);
  auto [run, inserted] = free_.emplace(offset, bytes);
  EBBTIDE_CHECK(inserted && used_bytes_ >= bytes, "a run is given back once");
  used_bytes_ -= bytes;
  const auto next = std::next(run);
  if (next != free_.end() && next->first == run->first + run->second) {
    run->second += next->second;
    free_.erase(next);
  }
  if (run == free_.begin()) return;
  const auto previous = std::prev(run);
  if (previous->first + previous->second == run->first) {
    previous->second += run->second;
    free_.erase(run);
  }
}

}  // namespace ebbtide::service
