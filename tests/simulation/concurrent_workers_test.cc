// SPDX-License-Identifier: Apache-2.0
//
// The service under several workers at once, on real threads and real tiers, while others watch and
// read the same sequences. What each worker is told is held against its oracle, as in the
// simulation; the order of things is the machine's, and the thread sanitizer looks on.

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gtest/gtest.h"

#include "service/reason.h"
#include "tests/simulation/sequence_oracle.h"
#include "tests/support/comes_true.h"
#include "tests/support/engine_stand.h"
#include "tests/support/random_seed.h"

namespace ebbtide::test {
namespace {

constexpr int kWorkers = 3;
constexpr int kSequencesOfAWorker = 2;  // One after the other.
constexpr const char* kPolicies[] = {"snapkv+caote", "h2o", "tova+fastcaote", "keydiff"};
constexpr const char* kRecalls[] = {"exact", "bounded(0.1)", "estimated(0.02)", "off"};

std::string NameOf(int worker, int sequence) {
  return "worker " + std::to_string(worker) + " sequence " + std::to_string(sequence);
}
uint64_t SeedOf(uint64_t seed, int worker, int sequence) {
  return seed + static_cast<uint64_t>(100 * worker + sequence);
}

void Work(service::Engine& engine, int worker, uint64_t seed) {
  std::mt19937_64 random(seed + static_cast<uint64_t>(worker));
  for (int n = 0; n < kSequencesOfAWorker; ++n) {
    service::OpenArgs args;
    args.policy = kPolicies[random() % std::size(kPolicies)];
    args.recall = kRecalls[random() % std::size(kRecalls)];
    args.budget_tokens = 48;
    args.chunk_tokens = 32;
    SequenceOracle oracle(engine, NameOf(worker, n), SeedOf(seed, worker, n), args);
    ASSERT_TRUE(oracle.Open());
    for (int step = 0; step < 30; ++step) {
      const bool is_prefill = random() % 3 == 0;
      ASSERT_TRUE(oracle.Step(is_prefill ? 1 + static_cast<int32_t>(random() % 32) : 1,
                              is_prefill ? service::Phase::kPrefill : service::Phase::kDecode,
                              absl::Seconds(30)));
      if (testing::Test::HasFailure()) return;
    }
    for (int lane = 0; lane < 4; ++lane) {
      const uint64_t before = oracle.counts().checked_pages;
      // A layer that is being read along answers "call in flight".
      ASSERT_TRUE(ComesTrue([&] {
        oracle.CheckBytes(lane / 2, lane % 2);
        return oracle.counts().checked_pages > before || testing::Test::HasFailure();
      }));
    }
    oracle.Close();
  }
}

// Not open yet, closed, or its worker is at it: what somebody who looks on must take.
bool IsInTheWay(const absl::Status& status) {
  const std::string reason = service::ReasonOf(status);
  return reason == "SEQUENCE_UNKNOWN" || reason == "CALL_IN_FLIGHT";
}

// Right bytes of the right sequence, whatever its worker does meanwhile.
void ReadAlong(service::Engine& engine, uint64_t seed, uint64_t draw) {
  const auto worker = static_cast<int>(draw % kWorkers);
  const auto n = static_cast<int>(draw / 8 % kSequencesOfAWorker);
  const auto layer = static_cast<uint32_t>(draw / 32 % 2);
  const auto head = static_cast<uint32_t>(draw / 64 % 2);
  const std::string name = NameOf(worker, n);
  const auto pages = engine.ReadPages({.sequence = name, .layer = layer, .kv_head = head});
  if (!pages.ok()) {
    ASSERT_TRUE(IsInTheWay(pages.status())) << pages.status();
    return;
  }
  const Tokens tokens = TokensOf(SeedOf(seed, worker, n));
  const size_t row = tokens.geometry.page_shape().row_bytes();
  for (const service::PageBytes& page : *pages) {
    // A page that its worker's Close took away between two looks is missing, never wrong.
    if (page.state != service::PageAnswer::kOk) continue;
    const auto first = static_cast<int32_t>(page.first_index);
    const auto count = static_cast<int32_t>(page.tokens);
    const std::vector<std::byte> keys = tokens.Keys(static_cast<int>(layer), first, count);
    const std::vector<std::byte> values = tokens.Values(static_cast<int>(layer), first, count);
    for (size_t t = 0; t < page.tokens; ++t) {
      const size_t at = (t * static_cast<size_t>(tokens.geometry.kv_heads) + head) * row;
      ASSERT_EQ(std::memcmp(page.k.data() + t * row, keys.data() + at, row), 0) << name;
      ASSERT_EQ(std::memcmp(page.v.data() + t * row, values.data() + at, row), 0) << name;
    }
  }
}

void Watch(service::Engine& engine, uint64_t seed, uint64_t watcher,
           const std::atomic<bool>& is_over) {
  std::mt19937_64 random(~(seed + watcher));
  while (!is_over && !testing::Test::HasFailure()) {
    ReadAlong(engine, seed, random());
    for (const auto& tier : engine.GetStats().tiers) ASSERT_LE(tier.used_bytes, tier.budget_bytes);
    for (const auto& summary : engine.ListSequences("", 10)) {
      const auto described = engine.Describe(
          {.sequence = summary.sequence, .with_lanes = true, .with_tokens = true, .layer = 1});
      ASSERT_TRUE(described.ok() || IsInTheWay(described.status())) << described.status();
    }
    engine.CloseIdle();
    engine.CheckInvariants();
  }
}

TEST(ConcurrentWorkersTest, EachGetsItsOwnBytesAndTrueBounds) {
  ForEachSeed(2, [](uint64_t seed) {
    EngineStand stand({.device_bytes = 2 << 20,
                       .host_bytes = 300 << 10,
                       .rocksdb_bytes = 192 << 20,
                       .threads = 3});
    std::atomic<bool> is_over = false;
    std::vector<std::thread> watchers;
    for (uint64_t w = 0; w < 2; ++w) {
      watchers.emplace_back([&, w] { Watch(stand.engine(), seed, w, is_over); });
    }
    std::vector<std::thread> workers;
    for (int w = 0; w < kWorkers; ++w)
      workers.emplace_back([&, w] { Work(stand.engine(), w, seed); });
    for (std::thread& worker : workers) worker.join();
    is_over = true;
    for (std::thread& watcher : watchers) watcher.join();

    stand.Settle();
    EXPECT_EQ(stand.engine().GetStats().sequences, 0U);
    EXPECT_GT(stand.engine().GetStats().blocks_moved_down, 0U);
    for (const auto& tier : stand.engine().GetStats().tiers) EXPECT_EQ(tier.tokens, 0U);
  });
}

}  // namespace
}  // namespace ebbtide::test
