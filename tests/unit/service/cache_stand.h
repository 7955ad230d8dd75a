// SPDX-License-Identifier: Apache-2.0
//
// A cache with its mover over tiers in memory that fail on demand, where time, carriers and tokens
// are the test's. Whatever is below the host stands in for RocksDB: the mover knows tiers by their
// contract.

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gpu/cpu/cpu_backend.h"
#include "service/cache.h"
#include "service/movement/mover.h"
#include "storage/byte_budget.h"
#include "storage/host/host_tier.h"
#include "tests/support/engine_stand.h"
#include "tests/support/fake_clock.h"
#include "tests/support/faulty_tier.h"
#include "tests/support/stepped_executor.h"

namespace ebbtide::test {

// Room for so many records of each size, all below.
service::LowerRoom RoomFor(uint64_t records, std::span<const storage::RecordSize> sizes);

struct CacheSetup {
  uint64_t device_bytes = 8 << 20;
  int32_t host_blocks = 100;  // Records that the host's budget has room for.
  int32_t below_blocks = 0;   // 0: no tier below.
  size_t queue_limit = 1024;  // Of the carriers.
};

class CacheStand {
 public:
  explicit CacheStand(const CacheSetup& setup = {});

  service::Cache& cache() { return cache_; }
  service::Mover& mover() { return mover_; }
  gpu::Backend& backend() { return backend_; }
  const service::LowerTiers& tiers() const { return tiers_; }
  FakeClock& clock() { return clock_; }
  SteppedExecutor& carriers() { return carriers_; }
  FaultyTier& host() { return host_; }
  FaultyTier& below() { return below_; }
  storage::ByteBudget& host_budget() { return host_budget_; }
  std::span<const std::byte> pool() const { return pool_; }
  const Tokens& tokens() const { return tokens_; }
  storage::RecordSize record_size() const;
  // What the cache sees from now on where it looks at the room; before, room for all that is asked.
  void SetRoom(service::LookAtRoom look) { look_at_room_ = std::move(look); }
  // What one record takes of the host's budget.
  uint64_t host_cost() const;

  service::SequenceRef Open(const std::string& name, int32_t budget_tokens = 64,
                            int32_t chunk_tokens = 512, const std::string& model = "m");
  service::Ticket Begin(const std::string& name, uint32_t layer, uint64_t first, int32_t tokens);
  // The tokens take slots and lie in them; what they need is charged to nobody.
  void Place(const service::Ticket& ticket, const std::vector<int32_t>& victims = {});
  // Whether blocks became complete.
  bool Finish(const service::Ticket& ticket);
  // All layers of a step; `victims` leave every lane first.
  void Append(const std::string& name, uint64_t first, int32_t tokens,
              const std::vector<int32_t>& victims = {});
  // Closes as the engine does.
  void Close(const std::string& name);
  // As each second: looks whether the tier below is well, kicks the mover, and runs carriers until
  // none waits.
  void Carry();

  service::Block PlaceOf(const service::SequenceRef& sequence, size_t block) {
    return cache_.Places(sequence)[block];
  }
  // The page that `block` should be in a lane: [K tokens x d][V tokens x d].
  std::vector<std::byte> Page(int layer, int kv_head, int32_t block) const;

 private:
  Tokens tokens_{.geometry = SmallGeometry()};
  FakeClock clock_;
  SteppedExecutor carriers_;
  std::vector<std::byte> pool_;
  storage::ByteBudget host_budget_;
  storage::ByteBudget below_budget_;
  std::unique_ptr<storage::HostTier> host_tier_;
  std::unique_ptr<storage::HostTier> below_tier_;
  FaultyTier host_;
  FaultyTier below_;
  storage::CircuitBreaker breaker_;
  gpu::CpuBackend backend_{1};
  service::LowerTiers tiers_;
  service::LookAtRoom look_at_room_ = [](auto sizes) { return RoomFor(uint64_t{1} << 40, sizes); };
  service::Cache cache_;
  service::Mover mover_;
};

}  // namespace ebbtide::test
