// SPDX-License-Identifier: Apache-2.0
//
// Brings parts of absent pages within reach of a kernel: in place where the host tier keeps them,
// staged from the RocksDB tier, gathered from slots where no copy below is confirmed yet: the same
// bytes wherever the page lies, so that when it is sealed changes no answer and no victim. Every
// part is checked before it is handed out. Tested by tests/unit/service/page_source_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"

#include "gpu/device.h"
#include "service/cache.h"
#include "service/movement/mover.h"
#include "storage/block_record.h"
#include "storage/tier.h"

namespace ebbtide::service {

enum class FetchState : uint8_t {
  kOk,
  kMissing,       // The tier that should hold it does not.
  kCorrupt,       // Its check failed.
  kUnavailable,   // Its tier does not answer.
  kOutOfTime,     // Its tier did not answer in time.
  kNoStaging,     // No share of the staging came free in time.
  kDeviceFailed,  // It could not be gathered from its slots.
};

struct PageRequest {
  int kv_head = 0;
  int32_t page = 0;
  storage::PagePart part = storage::PagePart::kExact;
  // Out:
  std::span<const std::byte> bytes = {};  // Valid until GiveUp or the next Fetch; empty unless kOk.
  TierName tier = TierName::kHost;        // kDevice: gathered from slots.
  FetchState state = FetchState::kMissing;
};

// Memory for staged pages: a few equal shares, charged to the host tier once. Thread-safe.
class Staging {
 public:
  static constexpr int kShares = 4;
  explicit Staging(uint64_t bytes) : share_bytes_(bytes / kShares) {}
  uint64_t share_bytes() const { return share_bytes_; }
  // Waits for another fetch to give its share back; false where none did.
  bool TakeShare(absl::Duration patience) ABSL_LOCKS_EXCLUDED(mu_);
  void GiveShare() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  const uint64_t share_bytes_;
  absl::Mutex mu_;
  int free_ ABSL_GUARDED_BY(mu_) = kShares;
};

// One layer's call. Thread-compatible.
class PageSource {
 public:
  PageSource(Cache& cache, const LowerTiers& tiers, Staging& staging, const gpu::Device& device,
             const Ticket& ticket);
  ~PageSource();

  // How many bytes a caller should ask for in one Fetch.
  uint64_t group_bytes() const { return staging_.share_bytes(); }
  uint64_t bytes_of(storage::PagePart part) const;

  // Fills each request. Pages that lie in the host are read in place; others need a share of the
  // staging, which all may be lent for longer than `patience`, as their tier may take longer. Pages
  // that are lost are counted and logged, each once.
  void Fetch(std::span<PageRequest> requests, absl::Duration patience);
  // What the device said where it failed a fetch.
  const absl::Status& status() const { return status_; }
  // Gives up the bytes of the last Fetch, and the share that they may lie in, which others wait
  // for: for whoever has used them, and computes on without.
  void GiveUp();
  // The name of a page that is missing or corrupt.
  LostPage Lost(const PageRequest& request) const;

 private:
  struct PinnedBlock {
    storage::BlockPin pin;
    std::optional<storage::RecordHeader> header;  // None: damaged.
  };

  const PinnedBlock* Pinned(int32_t block);
  void FetchFromSlots(PageRequest& request);
  std::span<const std::byte> Encode(const gpu::PageShape& shape, std::span<const std::byte> page,
                                    storage::PagePart part);
  bool FetchInPlace(PageRequest& request);
  bool FindPart(const PinnedBlock& block, PageRequest& request) const;
  void FetchStaged(std::span<PageRequest*> requests, absl::Duration patience);
  void NoteLost(std::span<const PageRequest> requests);
  std::span<std::byte> Stage(size_t bytes);

  Cache& cache_;
  const LowerTiers tiers_;
  Staging& staging_;
  const gpu::Device& device_;
  const SequenceRef sequence_;
  const int layer_;
  absl::Status status_;
  bool holds_share_ = false;
  absl::flat_hash_map<int32_t, PinnedBlock> pinned_;  // By block number.
  std::vector<std::vector<std::byte>> staged_;
};

}  // namespace ebbtide::service
