// SPDX-License-Identifier: Apache-2.0
//
// The whole service on a CUDA device: the emulator runs its kernels, and its memory faults wherever
// the service touches it itself. Answers are those of the simulated device, as far as two devices
// agree.

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/cuda/cuda_backend.h"
#include "tests/cuemu/device.h"
#include "tests/support/engine_stand.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::service {
namespace {

using test::EngineStand;
using test::Tokens;
using test::Worker;
using testing::FloatNear;
using testing::Pointwise;

struct Asked {
  std::string policy;
  std::string recall;
};

class EngineOnCudaTest : public testing::TestWithParam<Asked> {
 protected:
  void SetUp() override { cuemu::SetDevice({.hides_memory = true}); }
  void TearDown() override { cuemu::SetDevice({}); }

  static std::unique_ptr<gpu::Backend> MakeCuda(gpu::Backend& /*simulated*/) {
    auto backend = gpu::CudaBackend::Make();
    EXPECT_OK(backend);
    return *std::move(backend);
  }
};

// A prompt, then steps of decoding with a budget that makes tokens leave.
std::vector<StepAnswer> Play(EngineStand& stand, const Asked& asked) {
  const Tokens tokens{.geometry = test::SmallGeometry(), .seed = 7};
  Worker worker(stand.engine(), tokens, "s");
  worker.open.policy = asked.policy;
  worker.open.budget_tokens = 48;
  worker.open.recall = asked.recall;
  EXPECT_OK(worker.Open());
  std::vector<StepAnswer> answers;
  answers.push_back(worker.StepAllLayers({.first = 0, .count = 80, .phase = Phase::kPrefill}));
  for (int32_t token = 80; token < 86; ++token) {
    stand.Settle();
    answers.push_back(worker.StepAllLayers({.first = token}));
  }
  stand.engine().CheckInvariants();
  EXPECT_OK(stand.engine().CloseSequence("s"));
  return answers;
}

std::vector<float> Numbers(const std::vector<std::byte>& bytes) {
  std::vector<float> numbers(bytes.size() / sizeof(float));
  if (!numbers.empty()) std::memcpy(numbers.data(), bytes.data(), bytes.size());
  return numbers;
}

TEST_P(EngineOnCudaTest, AnswersAsOnTheSimulatedDevice) {
  EngineStand simulated;
  EngineStand cuda({.wrap_backend = &MakeCuda});

  const std::vector<StepAnswer> expected = Play(simulated, GetParam());
  const std::vector<StepAnswer> answers = Play(cuda, GetParam());

  for (size_t step = 0; step < answers.size(); ++step) {
    ASSERT_OK(expected[step].status) << step;
    ASSERT_OK(answers[step].status) << step;
    EXPECT_THAT(Numbers(answers[step].output),
                Pointwise(FloatNear(1e-4F), Numbers(expected[step].output)))
        << step;
  }
  EXPECT_GT(answers.back().absent_pages, 0U);
}

INSTANTIATE_TEST_SUITE_P(Policies, EngineOnCudaTest,
                         testing::Values(Asked{"h2o+caote", "exact"},
                                         Asked{"tova+fastcaote", "bounded(0.02)"},
                                         Asked{"snapkv", "estimated(0.02)"},
                                         Asked{"keydiff", "off"}),
                         [](const auto& test) {
                           std::string name = test.param.policy;
                           std::ranges::replace(name, '+', '_');
                           return name;
                         });

}  // namespace
}  // namespace ebbtide::service
