// SPDX-License-Identifier: Apache-2.0
//
// An engine on real tiers in memory and in a temporary folder, and a worker who knows what it sent:
// the ground that tests of the service stand on.

#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/executor.h"
#include "gpu/cpu/cpu_backend.h"
#include "service/engine.h"
#include "storage/byte_budget.h"
#include "storage/host/host_tier.h"
#include "storage/rocksdb/file_calls.h"
#include "storage/tier.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::test {

struct EngineSetup {
  uint64_t device_bytes = 64 << 20;
  uint64_t host_bytes = 64 << 20;
  uint64_t rocksdb_bytes = 0;  // 0: none.
  int threads = 2;
  Executor* carriers = nullptr;              // Null: a thread of the stand's own.
  Clock* clock = nullptr;                    // Null: the steady one.
  storage::FileCalls* file_calls = nullptr;  // Of the RocksDB tier; null: the kernel's.
  absl::Duration idle_timeout = absl::Minutes(10);
  uint64_t recall_bytes = service::EngineOptions().recall_bytes;
  // Puts a decorator between the engine and a tier, or its device.
  std::function<std::unique_ptr<storage::Tier>(storage::Tier&)> wrap_host = {};
  std::function<std::unique_ptr<storage::Tier>(storage::Tier&)> wrap_rocksdb = {};
  std::function<std::unique_ptr<gpu::Backend>(gpu::Backend&)> wrap_backend = {};
};

class EngineStand {
 public:
  explicit EngineStand(const EngineSetup& setup = {});
  ~EngineStand();

  service::Engine& engine() { return *engine_; }
  storage::ByteBudget& host_budget() { return host_budget_; }
  storage::HostTier& host() { return *host_; }
  storage::Tier* rocksdb() { return rocksdb_.get(); }
  Clock& clock() { return clock_; }
  std::string folder() const { return folder_.path().string(); }
  // Everything complete is sealed; fails the test after ten seconds.
  void Settle();

 private:
  TempFolder folder_;
  Clock& clock_;
  gpu::CpuBackend backend_;
  std::unique_ptr<Executor> carriers_;
  ParallelFor parallel_;
  storage::ByteBudget host_budget_;
  std::unique_ptr<storage::HostTier> host_;
  std::unique_ptr<storage::Tier> rocksdb_;
  std::unique_ptr<storage::Tier> wrapped_host_;
  std::unique_ptr<storage::Tier> wrapped_rocksdb_;
  std::unique_ptr<gpu::Backend> wrapped_backend_;
  std::unique_ptr<service::Engine> engine_;
};

// Tokens that a worker sends, drawn from (seed, layer, head, index), so that a wrong byte tells
// where it came from. Keys have a slowly moving mean and a few loud channels, as real ones do.
struct Tokens {
  service::Geometry geometry;
  uint64_t seed = 1;
  gpu::Dtype output_dtype = gpu::Dtype::kF32;  // That the worker asks answers in.

  std::vector<std::byte> Keys(int layer, int32_t first,
                              int32_t count) const;  // [count, kv_heads, head_dim]
  std::vector<std::byte> Values(int layer, int32_t first, int32_t count) const;
  std::vector<float> Queries(int layer, int32_t first,
                             int32_t count) const;  // [count, query_heads, head_dim]
};

// The output of token `token` of an answer, as the worker reads it: [query_heads, head_dim].
std::vector<double> OutputOf(const service::StepAnswer& answer, const Tokens& tokens, size_t token);

// Full attention in float64 over tokens 0 .. index of one layer: [query_heads, head_dim].
std::vector<double> FullAttention(const Tokens& tokens, int layer, int32_t index);

// An answer's token beside full attention.
struct Errors {
  double relative = 0;  // Over the heads.
  int violations = 0;   // Of the certificate, per head.
};
// Of the last token of an answer of `count`, which is token `index`.
Errors ErrorsOf(const service::StepAnswer& answer, const Tokens& tokens, int layer, int32_t index,
                int32_t count);

service::Geometry SmallGeometry();  // 2 layers, 4 query heads, 2 kv heads of 16, f32, pages of 16.

// A worker of one sequence.
class Worker {
 public:
  // `clock` is the engine's.
  Worker(service::Engine& engine, const Tokens& tokens, std::string sequence,
         Clock& clock = SteadyClock())
      : engine_(engine), tokens_(tokens), sequence_(std::move(sequence)), clock_(clock) {}

  service::OpenArgs open;  // Budget, policy, …; sequence and model are filled in.

  absl::StatusOr<service::OpenAnswer> Open();
  // One call of one layer.
  struct Call {
    int layer = 0;
    int32_t first = 0;
    int32_t count = 1;
    service::Phase phase = service::Phase::kDecode;
    bool sends_queries = true;
    bool appends = true;
    bool require_met = false;
    absl::Duration patience = absl::Seconds(10);
  };
  service::StepAnswer Step(const Call& call);
  // All layers of a step; the last layer's answer, or the first that failed.
  service::StepAnswer StepAllLayers(Call call);

 private:
  service::Engine& engine_;
  const Tokens& tokens_;
  const std::string sequence_;
  Clock& clock_;
};

}  // namespace ebbtide::test
