// SPDX-License-Identifier: Apache-2.0
//
// Two engines are asked the same; one keeps everything in a large host tier, the other has little
// staging and most blocks on disk. Their answers have the same bits, for every kind of recall: what
// is added up in which order depends on the call alone.

#include <cstddef>
#include <string>
#include <vector>

#include "gtest/gtest.h"

#include "tests/support/engine_stand.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::service {
namespace {

using test::EngineSetup;
using test::EngineStand;
using test::Tokens;
using test::Worker;

constexpr int32_t kPrompt = 2048;
constexpr int32_t kDecoded = 12;

struct Answers {
  std::vector<std::vector<std::byte>> outputs;
  uint64_t bytes_from_disk = 0;
};

class RecallOrderTest : public testing::TestWithParam<const char*> {
 protected:
  // Everything is sealed before the next call, so that slots are the same ones in both engines.
  void Run(const EngineSetup& setup, Answers& answers) {
    const Tokens tokens{.geometry = {.layers = 1,
                                     .query_heads = 4,
                                     .kv_heads = 2,
                                     .head_dim = 64,
                                     .dtype = gpu::Dtype::kF32,
                                     .scale = 0.125F,
                                     .page_tokens = 32}};
    EngineStand stand(setup);
    Worker worker(stand.engine(), tokens, "a");
    worker.open = {.policy = "streaming",
                   .prefill = "blockwise(64)",
                   .recall = GetParam(),
                   .budget_tokens = 128,
                   .chunk_tokens = 64};
    ASSERT_OK(worker.Open().status());
    for (int32_t first = 0; first < kPrompt; first += 64) {
      ASSERT_OK(
          worker
              .StepAllLayers(
                  {.first = first, .count = 64, .phase = Phase::kPrefill, .sends_queries = false})
              .status);
      stand.Settle();
    }
    for (int32_t index = kPrompt; index < kPrompt + kDecoded; ++index) {
      const StepAnswer answer = worker.StepAllLayers({.first = index});
      ASSERT_OK(answer.status);
      answers.outputs.push_back(answer.output);
      for (const TouchedRung& touched : answer.touched)
        if (touched.tier == TierName::kRocksdb) answers.bytes_from_disk += touched.bytes;
      stand.Settle();
    }
  }
};

TEST_P(RecallOrderTest, BitsDependNeitherOnTiersNorOnStaging) {
  Answers roomy;
  Answers narrow;
  ASSERT_NO_FATAL_FAILURE(Run({.host_bytes = 64 << 20}, roomy));
  ASSERT_NO_FATAL_FAILURE(Run({.host_bytes = 2 << 20, .rocksdb_bytes = 64 << 20}, narrow));

  EXPECT_EQ(roomy.bytes_from_disk, 0);
  EXPECT_GT(narrow.bytes_from_disk, 0);
  EXPECT_EQ(roomy.outputs, narrow.outputs);
}

INSTANTIATE_TEST_SUITE_P(EveryRecall, RecallOrderTest,
                         testing::Values("bounded(0.02)", "estimated(0.02)", "exact"),
                         [](const auto& test) {
                           const std::string recall = test.param;
                           return recall.substr(0, recall.find('('));
                         });

}  // namespace
}  // namespace ebbtide::service
