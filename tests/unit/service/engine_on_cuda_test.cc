// SPDX-License-Identifier: Apache-2.0
//
// The whole service on a CUDA device: the emulator runs its kernels, and its memory faults wherever
// the service touches it itself. Answers are those of the simulated device, as far as two devices
// agree.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/cuda/cuda_backend.h"
#include "service/reason.h"
#include "tests/cuemu/device.h"
#include "tests/cuemu/runtime.h"
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

std::unique_ptr<gpu::Backend> MakeCuda(gpu::Backend& /*simulated*/) {
  auto backend = gpu::CudaBackend::Make();
  EXPECT_OK(backend);
  return *std::move(backend);
}

// A CUDA backend that looks at what attends and decodings read in the host tier's reach.
class ReachWatch final : public gpu::Backend {
 public:
  explicit ReachWatch(std::unique_ptr<gpu::Backend> backend) : backend_(std::move(backend)) {}

  std::string_view name() const override { return backend_->name(); }
  bool is_simulated() const override { return backend_->is_simulated(); }
  absl::StatusOr<gpu::DeviceBuffer> Allocate(size_t bytes) override {
    return backend_->Allocate(bytes);
  }
  absl::StatusOr<std::unique_ptr<gpu::Stream>> MakeStream() override {
    return backend_->MakeStream();
  }
  absl::StatusOr<std::unique_ptr<gpu::HostReach>> ReachHost(
      std::span<const std::byte> addresses) override {
    auto reach = backend_->ReachHost(addresses);
    if (reach.ok()) reach_ = addresses;
    return reach;
  }
  absl::Status Run(gpu::Stream& stream, const gpu::Batch& batch) override {
    if (const auto* lanes = std::get_if<std::span<const gpu::AttendArgs>>(&batch)) {
      for (const gpu::AttendArgs& args : *lanes) {
        const size_t row = static_cast<size_t>(args.head_dim) * gpu::DtypeBytes(args.dtype);
        for (const gpu::Extent& extent : args.extents) {
          Look(extent.key, static_cast<size_t>(extent.slots) * row);
          Look(extent.value, static_cast<size_t>(extent.slots) * row);
        }
      }
    }
    if (const auto* pages = std::get_if<std::span<const gpu::DecodeArgs>>(&batch)) {
      for (const gpu::DecodeArgs& args : *pages) Look(args.coarse.data(), args.coarse.size());
    }
    return backend_->Run(stream, batch);
  }

  size_t read_in_place() const { return read_in_place_; }
  size_t unregistered() const { return unregistered_; }

 private:
  void Look(const std::byte* array, size_t bytes) {
    if (array < reach_.data() || array >= reach_.data() + reach_.size()) return;
    ++read_in_place_;
    unregistered_ += cuemu::IsRegistered(array, bytes) ? 0 : 1;
  }

  const std::unique_ptr<gpu::Backend> backend_;
  std::span<const std::byte> reach_;
  std::atomic<size_t> read_in_place_ = 0;  // Arrays of calls' own threads.
  std::atomic<size_t> unregistered_ = 0;
};

class EngineOnCudaFaultTest : public testing::Test {
 protected:
  void SetUp() override { cuemu::SetDevice({.hides_memory = true}); }
  void TearDown() override { cuemu::SetDevice({}); }
};
class EngineOnCudaTest : public EngineOnCudaFaultTest, public testing::WithParamInterface<Asked> {};

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

TEST_F(EngineOnCudaFaultTest, RecalledPagesAreReadWhereTheHostTierHoldsThem) {
  ReachWatch* watch = nullptr;
  EngineStand cuda({.wrap_backend = [&](gpu::Backend& simulated) {
    auto watched = std::make_unique<ReachWatch>(MakeCuda(simulated));
    watch = watched.get();
    return watched;
  }});

  const std::vector<StepAnswer> answers = Play(cuda, {.policy = "streaming", .recall = "exact"});

  EXPECT_GT(answers.back().absent_pages, 0U);
  EXPECT_GT(watch->read_in_place(), 0U);
  EXPECT_EQ(watch->unregistered(), 0U);
}

// Then they are copied, and answers are none the worse.
TEST_F(EngineOnCudaFaultTest, RecalledPagesNeedNotBeInReach) {
  EngineStand simulated;
  const std::vector<StepAnswer> expected = Play(simulated, {"streaming", "exact"});
  for (const bool reads_host_addresses : {false, true}) {
    cuemu::SetDevice({.reads_host_addresses = reads_host_addresses,
                      .hides_memory = true,
                      .registers_memory = false});
    ReachWatch* watch = nullptr;
    EngineStand cuda({.wrap_backend = [&](gpu::Backend& backend) {
      auto watched = std::make_unique<ReachWatch>(MakeCuda(backend));
      watch = watched.get();
      return watched;
    }});

    const std::vector<StepAnswer> answers = Play(cuda, {"streaming", "exact"});

    EXPECT_EQ(watch->read_in_place(), 0U);
    for (size_t step = 0; step < answers.size(); ++step) {
      ASSERT_OK(answers[step].status) << step;
      EXPECT_THAT(Numbers(answers[step].output),
                  Pointwise(FloatNear(1e-4F), Numbers(expected[step].output)))
          << step;
    }
  }
}

// Where the machine has no memory to pin, the device is neither full nor lost.
TEST_F(EngineOnCudaFaultTest, MemoryThatCannotBePinnedIsNotTheDevices) {
  EngineStand cuda({.wrap_backend = &MakeCuda});
  const Tokens tokens{.geometry = test::SmallGeometry()};
  Worker worker(cuda.engine(), tokens, "s");
  worker.open = {.policy = "streaming", .budget_tokens = 48};
  ASSERT_OK(worker.Open());
  cuemu::SetDevice({.hides_memory = true, .lockable_bytes = 0});

  const StepAnswer answer = worker.Step({.count = 8, .phase = Phase::kPrefill});

  EXPECT_EQ(ReasonOf(answer.status), "HOST_MEMORY_FULL");
  EXPECT_FALSE(cuda.engine().is_device_lost());
  cuemu::SetDevice({.hides_memory = true});
  EXPECT_OK(worker.Step({.count = 8, .phase = Phase::kPrefill}).status);
}

TEST_F(EngineOnCudaFaultTest, DeviceThatFailsIsLostWhateverItWasAskedFor) {
  EngineStand cuda({.wrap_backend = &MakeCuda});
  const Tokens tokens{.geometry = test::SmallGeometry()};
  Worker worker(cuda.engine(), tokens, "s");
  worker.open = {.policy = "streaming", .budget_tokens = 48};
  ASSERT_OK(worker.Open());
  EXPECT_FALSE(cuda.engine().is_device_lost());
  cuemu::BreakDevice();

  const StepAnswer answer = worker.Step({.count = 8, .phase = Phase::kPrefill});

  EXPECT_EQ(ReasonOf(answer.status), "DEVICE_LOST");
  EXPECT_TRUE(cuda.engine().is_device_lost());
  cuemu::HealDevice();
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
