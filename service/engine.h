// SPDX-License-Identifier: Apache-2.0
//
// Everything a caller can do, over the parts that do it: service/rpc translates to these methods and
// knows nothing behind them. Tests call them without a wire.

#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "base/clock.h"
#include "base/executor.h"
#include "gpu/backend.h"
#include "service/calls.h"
#include "storage/host/host_tier.h"
#include "storage/tier.h"

namespace ebbtide::service {

struct EngineOptions {
  uint64_t device_budget_bytes = 0;
  std::string default_recall = "bounded(0.02)";
  absl::Duration idle_timeout = absl::Minutes(10);
};

// What an engine stands on. Borrowed; must outlive it.
struct EngineParts {
  Clock& clock;
  Executor& carriers;            // Seals, moves and the idle sweep run here.
  gpu::Backend& backend;
  storage::Tier& host;           // The host tier, perhaps behind a decorator.
  storage::HostTier& host_memory;  // Its ledger, for what lies outside the arena.
  storage::Tier* rocksdb;        // Null: no tier below host.
};

// Thread-safe.
class Engine {
 public:
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineOptions& options,
                                                        const EngineParts& parts);
  virtual ~Engine() = default;

  virtual absl::StatusOr<Geometry> RegisterModel(std::string_view name, const Geometry& geometry,
                                                 std::string_view weights_fingerprint) = 0;
  virtual absl::StatusOr<OpenAnswer> OpenSequence(const OpenArgs& args) = 0;

  // One answer per item, in order. Attends where an item has q, appends where it has k and v.
  virtual std::vector<StepAnswer> Step(const StepCall& call, std::span<const StepItem> items) = 0;

  virtual absl::StatusOr<std::vector<PageBytes>> ReadPages(std::string_view sequence, uint32_t layer,
                                                           uint32_t kv_head, uint64_t first_page,
                                                           uint64_t page_count) = 0;
  virtual absl::StatusOr<uint64_t> Truncate(std::string_view sequence, uint64_t length) = 0;
  virtual absl::Status CloseSequence(std::string_view sequence) = 0;

  virtual Stats GetStats() = 0;
  // Sequences with names after `after`, in order of name, at most `limit`.
  virtual std::vector<SequenceSummary> ListSequences(std::string_view after, size_t limit) = 0;
  virtual absl::StatusOr<SequenceDescription> Describe(const DescribeArgs& args) = 0;

  // Closes sequences idle past their time-out; called now and then.
  virtual void CloseIdle() = 0;
  // Waits until everything complete is sealed and tiers are within their watermarks, or `deadline`.
  virtual void Settle(absl::Duration deadline) = 0;
};

}  // namespace ebbtide::service
