// SPDX-License-Identifier: Apache-2.0
//
// Everything a caller can do, over the parts that do it: service/rpc translates to these methods
// and knows nothing behind them. Tests call them without a wire.

#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "base/clock.h"
#include "base/executor.h"
#include "gpu/backend.h"
#include "service/calls.h"
#include "storage/byte_budget.h"
#include "storage/tier.h"

namespace ebbtide::service {

struct EngineOptions {
  uint64_t device_budget_bytes = 0;
  std::string default_recall = "estimated(0.02)";
  absl::Duration idle_timeout = absl::Minutes(10);
  // What recall may keep of the queries that it answers at once (service/attention/attention.h).
  uint64_t recall_bytes = uint64_t{256} << 20;
};

// What an engine stands on. Borrowed; must outlive it.
struct EngineParts {
  Clock& clock;
  Executor& carriers;     // Seals and moves run here.
  ParallelFor& parallel;  // What is done per lane or page.
  gpu::Backend& backend;  // The device: its memory is the pool, its kernels do the arithmetic.
  storage::Tier& host;
  storage::ByteBudget& host_budget;  // The host tier's, which metadata and staging share.
  storage::Tier* rocksdb = nullptr;  // Null: no tier below host.
  std::string rocksdb_place;         // Its folder.
};

struct ReadPagesArgs {
  std::string_view sequence;
  uint32_t layer = 0;
  uint32_t kv_head = 0;
  uint64_t first_page = 0;
  uint64_t page_count = 0;  // 0: to the end.
  uint64_t answer_bytes_max = std::numeric_limits<uint64_t>::max();
  // Asked once whether there is room for an answer of so many bytes; null: there is.
  std::function<absl::Status(uint64_t)> admit = nullptr;
  absl::Duration deadline = absl::InfiniteDuration();  // On the steady clock.
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

  virtual absl::StatusOr<std::vector<PageBytes>> ReadPages(const ReadPagesArgs& args) = 0;
  virtual absl::StatusOr<uint64_t> Truncate(std::string_view sequence, uint64_t length) = 0;
  virtual absl::Status CloseSequence(std::string_view sequence) = 0;

  virtual Stats GetStats() = 0;
  // Sequences with names after `after`, in order of name, at most `limit`.
  virtual std::vector<SequenceSummary> ListSequences(std::string_view after, size_t limit) = 0;
  virtual absl::StatusOr<SequenceDescription> Describe(const DescribeArgs& args) = 0;

  // Closes sequences idle past their time-out, and looks whether a tier that failed is well again:
  // called each second.
  virtual void CloseIdle() = 0;
  // Waits until everything complete is sealed, or `deadline`; returns whether it is.
  virtual bool Settle(absl::Duration deadline) = 0;
  // Whether the device failed, which only a new process can mend.
  virtual bool is_device_lost() = 0;
  // Stops the process where the model contradicts itself.
  virtual void CheckInvariants() = 0;
};

}  // namespace ebbtide::service
