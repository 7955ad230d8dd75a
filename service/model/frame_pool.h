// SPDX-License-Identifier: Apache-2.0
//
// The device pool's bytes, as numbers: the backend owns the memory. A sequence reserves all the
// frames it may ever need, in one run, when it opens, so a running sequence never finds the pool
// empty. Tested by tests/unit/service/frame_pool_test.cc.

#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace ebbtide::service {

// Thread-compatible: changed under the cache's lock only.
class FramePool {
 public:
  explicit FramePool(uint64_t budget_bytes) : budget_bytes_(budget_bytes) {
    if (budget_bytes > 0) free_.emplace(0, budget_bytes);
  }

  uint64_t budget_bytes() const { return budget_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }
  uint64_t free_bytes() const { return budget_bytes_ - used_bytes_; }
  uint64_t longest_run() const;  // Of free bytes.

  // A run of `bytes` (rounded up to kAlignment), by its offset in the pool; none where no run is
  // long enough. Best fit: of the runs that are long enough, the shortest; of equals, the first.
  std::optional<uint64_t> Reserve(uint64_t bytes);
  // Gives a run back; joined with free neighbours.
  void Release(uint64_t offset, uint64_t bytes);

  static constexpr uint64_t kAlignment = 4096;

 private:
  const uint64_t budget_bytes_;
  uint64_t used_bytes_ = 0;
  std::map<uint64_t, uint64_t> free_;  // offset to length
};

}  // namespace ebbtide::service
