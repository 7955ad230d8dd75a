// SPDX-License-Identifier: Apache-2.0
//
// A stretch of a recorded model on a CUDA device, which is the emulator, beside the same on the
// simulated device: each token that stays on one of them alone is a near tie, and answers are as
// far from full attention as there. EBBTIDE_STEPS says how many tokens are decoded (12).

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/cuda/cuda_backend.h"
#include "tests/cuemu/device.h"
#include "tests/support/engine_stand.h"
#include "tests/support/status_matchers.h"
#include "tests/support/trace_worker.h"

namespace ebbtide::service {
namespace {

using test::EngineStand;
using test::Played;
using test::TraceWorker;

constexpr int kPrompt = 96;
// Of the larger score. Scores are sums of f32 weights that two devices round their own way.
constexpr float kNearTie = 1e-4F;

struct Asked {
  std::string policy;
  std::string recall;
};

int Steps() {
  const char* text = std::getenv("EBBTIDE_STEPS");
  return text == nullptr ? 12 : std::atoi(text);
}

const std::vector<test::RecordedLayer>& Layers() {
  static const auto layers = test::ReadRecordedLayers(
      std::string(EBBTIDE_SOURCE_DIR) + "/tests/data/traces/smollm2-opticks-256.safetensors");
  return layers;
}

std::unique_ptr<gpu::Backend> MakeCuda(gpu::Backend& /*simulated*/) {
  auto backend = gpu::CudaBackend::Make();
  EXPECT_OK(backend);
  return *std::move(backend);
}

// Scores of the tokens that are resident in a lane.
std::map<uint64_t, float> Resident(Engine& engine, int layer, int kv_head) {
  const auto described = engine.Describe({.sequence = "a",
                                          .with_tokens = true,
                                          .layer = static_cast<uint32_t>(layer),
                                          .kv_head = static_cast<uint32_t>(kv_head)});
  EXPECT_OK(described);
  std::map<uint64_t, float> resident;
  for (const TokenDescription& token : described->tokens) {
    if (token.resident) resident.emplace(token.index, token.score);
  }
  return resident;
}

// Of tokens that `mine` alone has, in ascending order.
std::vector<float> Alone(const std::map<uint64_t, float>& mine,
                         const std::map<uint64_t, float>& others) {
  std::vector<float> scores;
  for (const auto& [index, score] : mine) {
    if (!others.contains(index)) scores.push_back(score);
  }
  std::ranges::sort(scores);
  return scores;
}

// Fails the test where the lanes of both hold different tokens that are no near ties; how many are.
size_t NearTies(Engine& simulated, Engine& cuda, const Geometry& geometry) {
  size_t ties = 0;
  for (int layer = 0; layer < geometry.layers; ++layer) {
    for (int kv_head = 0; kv_head < geometry.kv_heads; ++kv_head) {
      const auto here = Resident(simulated, layer, kv_head);
      const auto there = Resident(cuda, layer, kv_head);
      EXPECT_EQ(here.size(), there.size());
      EXPECT_LT(here.size(), static_cast<size_t>(kPrompt)) << "nothing left";
      const std::vector<float> only_here = Alone(here, there);
      const std::vector<float> only_there = Alone(there, here);
      for (size_t i = 0; i < std::min(only_here.size(), only_there.size()); ++i) {
        EXPECT_NEAR(only_here[i], only_there[i],
                    kNearTie * std::max(std::abs(only_here[i]), std::abs(only_there[i])))
            << "layer " << layer << ", lane " << kv_head;
      }
      ties += only_here.size();
    }
  }
  return ties;
}

class TraceOnCudaTest : public testing::TestWithParam<Asked> {
 protected:
  void SetUp() override { cuemu::SetDevice({.hides_memory = true}); }
  void TearDown() override { cuemu::SetDevice({}); }
};

TEST_P(TraceOnCudaTest, DifferentVictimsAreNearTiesAndErrorsAreTheSame) {
  EngineStand simulated;
  EngineStand cuda({.wrap_backend = &MakeCuda});
  TraceWorker here(simulated.engine(), Layers());
  TraceWorker there(cuda.engine(), Layers());
  for (TraceWorker* worker : {&here, &there}) {
    worker->Open({.policy = GetParam().policy,
                  .recall = GetParam().recall,
                  .budget_tokens = 48,
                  .chunk_tokens = 32});
  }

  size_t ties = 0;
  for (int first = 0; first < kPrompt + Steps();) {
    const bool is_prompt = first < kPrompt;
    const TraceWorker::Call call = {.first = first,
                                    .count = is_prompt ? 32 : 1,
                                    .phase = is_prompt ? Phase::kPrefill : Phase::kDecode};
    here.Step(call);
    there.Step(call);
    simulated.Settle();
    cuda.Settle();
    first += call.count;
    if (!is_prompt) ties += NearTies(simulated.engine(), cuda.engine(), here.geometry());
  }

  const Played& expected = here.played();
  const Played& played = there.played();
  std::printf(
      "%s %s: error p50 %.5f, max %.5f; simulated device p50 %.5f, max %.5f; near ties %zu\n",
      GetParam().policy.c_str(), GetParam().recall.c_str(), played.Quantile(0.5),
      played.Quantile(1), expected.Quantile(0.5), expected.Quantile(1), ties);
  EXPECT_EQ(played.violations, 0);
  EXPECT_EQ(played.not_met, expected.not_met);
  ASSERT_EQ(played.error.size(), expected.error.size());
  for (size_t i = 0; i < played.error.size(); ++i) {
    EXPECT_NEAR(played.error[i], expected.error[i], 1e-4) << i;
  }
  EXPECT_NEAR(played.AllRead(), expected.AllRead(), 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Policies, TraceOnCudaTest,
                         testing::Values(Asked{"h2o+caote", "bounded(0.02)"},
                                         Asked{"snapkv+caote", "estimated(0.02)"},
                                         Asked{"tova+fastcaote", "exact"},
                                         Asked{"keydiff", "bounded(0.02)"},
                                         Asked{"streaming", "off"}),
                         [](const auto& test) {
                           std::string name = test.param.policy;
                           std::ranges::replace(name, '+', '_');
                           return name;
                         });

}  // namespace
}  // namespace ebbtide::service
