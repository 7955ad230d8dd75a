// SPDX-License-Identifier: Apache-2.0
//
// What an engine costs as a whole, without a wire, beside what the machine could do in the same
// run.
//
//   engine_bench seal     sealing blocks into the host tier, on this thread, against memcpy of
//   their
//                         keys and values (aim: ratio 0.6)
//   engine_bench context  decode steps at a fixed budget as the context grows from 4k to 256k
//                         tokens, on one thread (aim: flat within 1.1 with recall off, 2 with
//                         bounded(0.02))
//   engine_bench space    bytes charged for digests, positions and score state (aim: 0.15), and
//                         bytes of a record with its forms, over those of its keys and values; a
//                         tier's own bytes over its records' are in tier_bench
//
// Keys and values are those of tests/support/engine_stand.h: slowly moving means, a few loud
// channels.

#include "service/engine.h"

#include <malloc.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/status_macros.h"
#include "tests/support/engine_stand.h"
#include "tests/support/stepped_executor.h"

namespace ebbtide::bench {
namespace {

using service::Geometry;
using test::EngineStand;
using test::Tokens;

constexpr uint64_t kMiB = uint64_t{1} << 20;
constexpr int32_t kBudgetTokens = 1024;

// This thread's own: a busy machine blurs it little.
double ThreadSeconds() {
  timespec now = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Geometry GeometryOf(int layers, int kv_heads, int group, int head_dim) {
  return {.layers = layers,
          .query_heads = kv_heads * group,
          .kv_heads = kv_heads,
          .head_dim = head_dim,
          .dtype = gpu::Dtype::kF16,
          .scale = head_dim == 64 ? 0.125F : 0.08838834764F,
          .page_tokens = 32};
}

uint64_t TokenBytes(const Geometry& geometry) {
  return static_cast<uint64_t>(geometry.lanes()) * 2 * geometry.page_shape().row_bytes();
}

void Settle(EngineStand& stand) {
  const absl::Duration deadline = stand.clock().SinceStart() + absl::Minutes(2);
  EBBTIDE_CHECK(stand.engine().Settle(deadline), "everything complete is sealed in time");
}

// One sequence, fed a chunk at a time. Stops the process where the engine refuses.
class Feeder {
 public:
  Feeder(service::Engine& engine, const Geometry& geometry, service::OpenArgs open)
      : engine_(engine), tokens_{.geometry = geometry, .seed = 7}, open_(std::move(open)) {
    open_.model = "bench";
    EBBTIDE_CHECK(engine_.RegisterModel(open_.model, geometry, "1").ok(), "the model is taken");
    const absl::Status status = engine_.OpenSequence(open_).status();
    EBBTIDE_CHECK(status.ok(), status.ToString().c_str());
  }
  ~Feeder() { EBBTIDE_CHECK(engine_.CloseSequence(open_.sequence).ok(), "the sequence closes"); }

  int32_t length() const { return length_; }

  // Appends `count` tokens to every layer.
  void Append(int32_t count) {
    for (int layer = 0; layer < tokens_.geometry.layers; ++layer)
      Call(layer, count, /*with_queries=*/false, nullptr);
    length_ += count;
  }

  // One token in every layer, attended; what the engine took of this thread, in seconds.
  double Decode() {
    double seconds = 0;
    for (int layer = 0; layer < tokens_.geometry.layers; ++layer)
      Call(layer, 1, /*with_queries=*/true, &seconds);
    ++length_;
    return seconds;
  }

 private:
  void Call(int layer, int32_t count, bool with_queries, double* seconds) {
    const Geometry& geometry = tokens_.geometry;
    const std::vector<std::byte> k = tokens_.Keys(layer, length_, count);
    const std::vector<std::byte> v = tokens_.Values(layer, length_, count);
    const std::vector<float> q =
        with_queries ? tokens_.Queries(layer, length_, count) : std::vector<float>();
    const int64_t kv_shape[] = {count, geometry.kv_heads, geometry.head_dim};
    const int64_t q_shape[] = {count, geometry.query_heads, geometry.head_dim};
    service::StepItem item{.sequence = open_.sequence,
                           .first_index = static_cast<uint64_t>(length_),
                           .k = service::TensorView{geometry.dtype, kv_shape, k},
                           .v = service::TensorView{geometry.dtype, kv_shape, v}};
    if (with_queries) {
      item.q = service::TensorView{gpu::Dtype::kF32, q_shape, std::as_bytes(std::span(q))};
    }
    const service::StepCall call{
        .layer = static_cast<uint32_t>(layer),
        .phase = with_queries ? service::Phase::kDecode : service::Phase::kPrefill};
    const double begin = ThreadSeconds();
    const std::vector<service::StepAnswer> answers = engine_.Step(call, {&item, 1});
    if (seconds != nullptr) *seconds += ThreadSeconds() - begin;
    EBBTIDE_CHECK(answers[0].status.ok(), answers[0].status.ToString().c_str());
  }

  service::Engine& engine_;
  const Tokens tokens_;
  service::OpenArgs open_;
  int32_t length_ = 0;
};

void Seal() {
  std::printf("%-28s %10s %10s %8s\n", "seal to host", "ms/block", "GB/s", "ratio");
  for (const int head_dim : {64, 128}) {
    const Geometry geometry = GeometryOf(8, 8, 1, head_dim);
    const uint64_t bytes = 32 * TokenBytes(geometry);
    test::SteppedExecutor carriers;
    EngineStand stand({.host_bytes = 512 * kMiB, .threads = 1, .carriers = &carriers});
    Feeder feeder(stand.engine(), geometry,
                  {.sequence = "s",
                   .policy = "streaming",
                   .budget_tokens = 128,
                   .sends_queries = false,
                   .chunk_tokens = 32});
    std::vector<std::byte> from(256 * kMiB, std::byte{1});
    std::vector<std::byte> to(256 * kMiB, std::byte{2});
    std::vector<double> seal, limit;
    for (uint64_t block = 0; block < 64; ++block) {
      feeder.Append(32);
      const uint64_t at = block * bytes % (256 * kMiB);
      double begin = ThreadSeconds();
      std::memcpy(&to[at], &from[at], bytes);
      limit.push_back(ThreadSeconds() - begin);
      begin = ThreadSeconds();
      carriers.RunAll();
      seal.push_back(ThreadSeconds() - begin);
    }
    const double seconds = Median(seal);
    std::printf("%4d KiB of K and V, d = %-3d %10.3f %10.2f %8.3f\n",
                static_cast<int>(bytes / 1024), head_dim, seconds * 1e3,
                static_cast<double>(bytes) / seconds * 1e-9, Median(limit) / seconds);
  }
}

void Context() {
  std::printf("%-16s %10s %12s %10s\n", "recall", "tokens", "step p50, us", "of 4k");
  for (const char* recall : {"off", "bounded(0.02)", "estimated(0.02)", "exact"}) {
    const Geometry geometry = GeometryOf(1, 2, 4, 64);
    EngineStand stand({.host_bytes = 1024 * kMiB, .threads = 1});
    Feeder feeder(
        stand.engine(), geometry,
        {.sequence = "s", .policy = "streaming", .recall = recall, .budget_tokens = kBudgetTokens});
    double first = 0;
    for (const int32_t tokens : {4096, 16384, 65536, 262144}) {
      while (feeder.length() < tokens) feeder.Append(std::min(512, tokens - feeder.length()));
      Settle(stand);
      feeder.Decode();
      std::vector<double> seconds;
      for (int step = 0; step < 31; ++step) seconds.push_back(feeder.Decode());
      const double p50 = Median(seconds);
      if (first == 0) first = p50;
      std::printf("%-16s %10d %12.0f %10.2f\n", recall, tokens, p50 * 1e6, p50 / first);
      std::fflush(stdout);
    }
  }
}

void Space() {
  std::printf("%-14s %6s %14s %14s\n", "policy", "d", "metadata/KV", "record/KV");
  for (const int head_dim : {64, 128}) {
    for (const char* policy : {"streaming", "h2o", "snapkv+caote"}) {
      const Geometry geometry = GeometryOf(8, 8, 1, head_dim);
      EngineStand stand({.device_bytes = 128 * kMiB, .host_bytes = 512 * kMiB, .threads = 2});
      Feeder feeder(stand.engine(), geometry,
                    {.sequence = "s",
                     .policy = policy,
                     .recall = "off",
                     .budget_tokens = 256,
                     .chunk_tokens = 128});
      while (feeder.length() < 4096) feeder.Append(128);
      Settle(stand);
      double metadata = 0;
      for (const service::TierReport& tier : stand.engine().GetStats().tiers)
        metadata += static_cast<double>(tier.metadata_bytes);
      const auto token_bytes = static_cast<double>(TokenBytes(geometry));
      std::printf("%-14s %6d %14.3f %14.3f\n", policy, head_dim,
                  metadata / (token_bytes * feeder.length()),
                  static_cast<double>(geometry.record(0).record_bytes()) / (32 * token_bytes));
    }
  }
}

// As service/main.cc has it: a step must not ask the kernel for memory.
void KeepMemory() {
  mallopt(M_MMAP_THRESHOLD, 1 << 30);
  mallopt(M_TRIM_THRESHOLD, 256 << 20);
  mallopt(M_TOP_PAD, 64 << 20);
}

int Main(std::span<char*> args) {
  const std::map<std::string, std::function<void()>> parts = {
      {"seal", Seal}, {"context", Context}, {"space", Space}};
  for (char* arg : args) {
    const auto part = parts.find(arg);
    if (part == parts.end()) {
      std::fprintf(stderr, "usage: engine_bench seal|context|space ...\n");
      return std::string(arg) == "--help" ? 0 : 2;
    }
    part->second();
  }
  return 0;
}

}  // namespace
}  // namespace ebbtide::bench

int main(int argc, char** argv) {
  ebbtide::bench::KeepMemory();
  return ebbtide::bench::Main(std::span(argv, static_cast<size_t>(argc)).subspan(1));
}
