// SPDX-License-Identifier: Apache-2.0
//
// When carriers seal and where blocks come to lie changes no victim: two engines get the same
// calls, one carries at once into one tier, the other late, in bursts, and into whichever tier
// takes the block.

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <tuple>

#include "gtest/gtest.h"

#include "tests/simulation/sequence_oracle.h"
#include "tests/support/engine_stand.h"
#include "tests/support/faulty_tier.h"
#include "tests/support/random_seed.h"
#include "tests/support/stepped_executor.h"

namespace ebbtide::test {
namespace {

constexpr int kSequences = 2;
constexpr int32_t kChunk = 128;
constexpr int32_t kBacklogMax = 32;  // Tokens not sealed: more, and a call would wait for slots.

void ExpectSameVictims(const service::OpenArgs& args, uint64_t seed) {
  std::mt19937_64 random(seed);
  SteppedExecutor prompt_carriers;
  SteppedExecutor late_carriers;
  EngineStand prompt({.carriers = &prompt_carriers});
  EngineStand late({.rocksdb_bytes = 192 << 20,
                    .carriers = &late_carriers,
                    .wrap_host = [&](storage::Tier& tier) {
                      auto moody = std::make_unique<FaultyTier>(tier, seed);
                      moody->Set({.full = 0.5});  // Then the block goes to the RocksDB tier.
                      return moody;
                    }});
  SequenceOracle a(prompt.engine(), "a", seed, args);
  SequenceOracle b(late.engine(), "a", seed, args);
  ASSERT_TRUE(a.Open() && b.Open());
  int32_t backlog = 0;
  for (int step = 0; step < 30; ++step) {
    const auto count = static_cast<int32_t>(random() % 2 == 0 ? 1 : 1 + random() % 20);
    const service::Phase phase = count == 1 ? service::Phase::kDecode : service::Phase::kPrefill;
    ASSERT_TRUE(a.Step(count, phase, absl::Minutes(1)));
    prompt_carriers.RunAll();
    ASSERT_TRUE(b.Step(count, phase, absl::Minutes(1)));
    backlog += count;
    if (backlog > kBacklogMax || random() % 8 == 0) {
      late_carriers.RunAll();
      backlog = 0;
    }
    ASSERT_EQ(a.Residents(), b.Residents()) << "step " << step;
  }
}

// Policy, recall, prefill.
class TimingTest
    : public testing::TestWithParam<std::tuple<const char*, const char*, const char*>> {};

TEST_P(TimingTest, ChangesNoVictim) {
  const auto& [policy, recall, prefill] = GetParam();
  const service::OpenArgs args{.policy = policy,
                               .prefill = prefill,
                               .recall = recall,
                               .budget_tokens = 48,
                               .chunk_tokens = kChunk};
  ForEachSeed(kSequences, [&](uint64_t seed) { ExpectSameVictims(args, seed); });
}

std::string NameOf(const testing::TestParamInfo<TimingTest::ParamType>& test) {
  const auto& [policy, recall, prefill] = test.param;
  std::string name = std::string(policy) + "_" + recall + "_" + prefill;
  std::erase_if(name, [](char c) { return c == '(' || c == ')' || c == '.'; });
  std::ranges::replace(name, '+', '_');
  return name;
}

INSTANTIATE_TEST_SUITE_P(
    Policies, TimingTest,
    testing::Combine(testing::Values("streaming", "keydiff", "h2o", "h2o+caote", "h2o+fastcaote",
                                     "tova", "tova+caote", "tova+fastcaote", "snapkv",
                                     "snapkv+caote", "snapkv+fastcaote"),
                     testing::Values("off", "bounded(0.02)", "estimated(0.02)", "exact"),
                     testing::Values("exact", "blockwise(32)")),
    NameOf);

}  // namespace
}  // namespace ebbtide::test
