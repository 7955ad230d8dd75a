// SPDX-License-Identifier: Apache-2.0
//
// Which addresses the device reaches: those of memory allocated on it, and those of host memory
// that it reads over the bus.
// Tested by tests/unit/gpu/backend_test.cc and cuda_backend_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

#include "base/status_macros.h"

namespace ebbtide::gpu {

// Thread-safe.
class DeviceRanges {
 public:
  enum class Where : uint8_t { kOutOfReach, kDevice, kHost };
  struct Range {
    std::span<const std::byte> bytes;
    Where where;
  };
  using Ranges = std::vector<Range>;

  // As they are now; changes make a new one.
  std::shared_ptr<const Ranges> Now() const {
    const absl::MutexLock lock(&mu_);
    return ranges_;
  }
  void Add(std::span<const std::byte> range, Where where) {
    const absl::MutexLock lock(&mu_);
    auto more = std::make_shared<Ranges>(*ranges_);
    more->push_back({range, where});
    ranges_ = std::move(more);
  }
  void Remove(std::span<const std::byte> range) {
    const absl::MutexLock lock(&mu_);
    auto fewer = std::make_shared<Ranges>(*ranges_);
    std::erase_if(*fewer, [&](const Range& each) { return each.bytes.data() == range.data(); });
    ranges_ = std::move(fewer);
  }

  // Which of `ranges`, which are few, holds `bytes` from `array` on.
  static Where Find(const Ranges& ranges, const std::byte* array, size_t bytes) {
    for (const auto& [range, where] : ranges) {
      const std::byte* const end = range.data() + range.size();
      if (std::less<>()(array, range.data()) || !std::less<>()(array, end)) continue;
      EBBTIDE_CHECK(bytes <= static_cast<size_t>(end - array),
                    "an array lies within the device's reach as a whole or not at all");
      return where;
    }
    return Where::kOutOfReach;
  }

 private:
  mutable absl::Mutex mu_;
  std::shared_ptr<const Ranges> ranges_ ABSL_GUARDED_BY(mu_) = std::make_shared<Ranges>();
};

}  // namespace ebbtide::gpu
