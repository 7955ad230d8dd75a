// SPDX-License-Identifier: Apache-2.0
//
// What the CUDA backend promises beyond backend.h: when results arrive, what a stream carries and
// keeps, and what is left after the device failed or was full.

#include "gpu/cuda/cuda_backend.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/host_memory_full.h"
#include "tests/cuemu/device.h"
#include "tests/cuemu/runtime.h"
#include "tests/support/death_test.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::gpu {
namespace {

using test::StatusIs;
using testing::Each;
using testing::HasSubstr;

constexpr size_t kMiB = size_t{1} << 20;

// Merges that give `output` the part's rows, for its own saw nothing.
struct Merge {
  explicit Merge(size_t rows, float value = 3)
      : part(rows, value), part_lse(rows, 0.0F), output(rows, -1.0F), lse(rows, -INFINITY) {}

  MergeArgs Args() {
    return {.rows = static_cast<int>(output.size()),
            .head_dim = 1,
            .part_output = part,
            .part_lse = part_lse,
            .output = output,
            .lse = lse};
  }

  std::vector<float> part, part_lse, output, lse;
};

class CudaBackendTest : public testing::Test {
 protected:
  void SetUp() override { MakeOn({}); }
  void TearDown() override {
    cuemu::HealDevice();
    stream_.reset();
    backend_.reset();
    EXPECT_EQ(cuemu::DeviceBytesTaken(), 0U);
    cuemu::SetDevice({});
  }

  void MakeOn(const cuemu::DeviceTraits& traits, const CudaBackendOptions& options = {}) {
    stream_.reset();
    cuemu::SetDevice(traits);
    auto backend = CudaBackend::Make(options);
    ASSERT_OK(backend);
    backend_ = *std::move(backend);
    auto stream = backend_->MakeStream();
    ASSERT_OK(stream);
    stream_ = *std::move(stream);
  }

  absl::Status Run(Merge& merge) {
    const std::vector<MergeArgs> lanes = {merge.Args()};
    return backend_->Run(*stream_, lanes);
  }

  std::unique_ptr<CudaBackend> backend_;
  std::unique_ptr<Stream> stream_;
};

// --- host memory that is read in place

class HostReachTest : public CudaBackendTest {
 protected:
  // One slot of 8 channels, whose key and value are ones.
  AttendArgs Ask(std::span<const std::byte> rows) {
    extent_ = {.key = rows.data(), .value = rows.data() + 16, .index = &index_, .slots = 1};
    return {.head_dim = 8,
            .scale = 1,
            .extents = {&extent_, 1},
            .query = query_,
            .query_index = {&index_, 1},
            .output = output_,
            .lse = {&lse_, 1},
            .logits = {}};
  }

  static constexpr uint16_t kOne = 0x3C00;  // As f16.
  static constexpr uint16_t kTwo = 0x4000;

  alignas(16) std::array<uint16_t, 64> halves_ = Ones();
  std::span<std::byte> memory_ = std::as_writable_bytes(std::span(halves_));
  Extent extent_;
  int32_t index_ = 0;
  std::vector<float> query_ = std::vector<float>(8, 0.5F);
  std::vector<float> output_ = std::vector<float>(8);
  float lse_ = 0;

 private:
  static std::array<uint16_t, 64> Ones() {
    std::array<uint16_t, 64> ones;
    ones.fill(kOne);
    return ones;
  }
};

TEST_F(HostReachTest, WhatIsRegisteredIsReadWhereItLies) {
  ASSERT_OK_AND_ASSIGN(const auto reach, backend_->ReachHost(memory_));
  ASSERT_OK_AND_ASSIGN(auto registered, reach->Register(memory_.first(64)));
  EXPECT_TRUE(cuemu::IsRegistered(memory_.data() + 16, 48));
  EXPECT_FALSE(cuemu::IsRegistered(memory_.data() + 16, 49));

  // The emulator's streams work while they are waited for: a copy would hold the ones.
  ASSERT_OK(backend_->Run(*stream_, std::vector<AttendArgs>{Ask(memory_)}));
  halves_.fill(kTwo);
  ASSERT_OK(stream_->Wait());

  EXPECT_THAT(output_, Each(2.0F));
  EXPECT_THAT(reach->Register(memory_.first(64)), StatusIs(absl::StatusCode::kInvalidArgument));
  registered.reset();
  EXPECT_EQ(cuemu::HostBytesRegistered(), 0U);
}

// Nine rows are two tiles, which would cross the bus one after the other.
TEST_F(HostReachTest, WhatIsReadMoreThanOnceIsBrought) {
  ASSERT_OK_AND_ASSIGN(const auto reach, backend_->ReachHost(memory_));
  ASSERT_OK_AND_ASSIGN(const auto registered, reach->Register(memory_.first(64)));
  AttendArgs args = Ask(memory_);
  const std::vector<float> query(9 * 8, 0.5F);
  std::vector<float> output(9 * 8);
  std::vector<float> lse(9);
  args.group = 9;
  args.query = query;
  args.output = output;
  args.lse = lse;
  ASSERT_OK(backend_->Run(*stream_, std::vector<AttendArgs>{args}));
  halves_.fill(kTwo);
  ASSERT_OK(stream_->Wait());

  EXPECT_THAT(output, Each(1.0F));
}

TEST_F(HostReachTest, WhatLiesOutsideIsBrought) {
  { ASSERT_OK_AND_ASSIGN(const auto closed, backend_->ReachHost(memory_)); }
  ASSERT_OK_AND_ASSIGN(const auto reach, backend_->ReachHost(memory_.last(64)));
  ASSERT_OK(backend_->Run(*stream_, std::vector<AttendArgs>{Ask(memory_)}));
  halves_.fill(kTwo);
  ASSERT_OK(stream_->Wait());

  EXPECT_THAT(output_, Each(1.0F));
}

TEST_F(HostReachTest, WhatCannotBeRegisteredIsTheMachines) {
  MakeOn({.lockable_bytes = 0});
  ASSERT_OK_AND_ASSIGN(const auto reach, backend_->ReachHost(memory_));

  const auto registered = reach->Register(memory_);

  EXPECT_THAT(registered, StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("host.budget")));
  EXPECT_TRUE(IsHostMemoryFull(registered.status()));
}

TEST_F(HostReachTest, DeviceWithOtherAddressesHasNone) {
  MakeOn({.reads_host_addresses = false});

  EXPECT_THAT(backend_->ReachHost(memory_),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("Emulated H200")));
}

TEST_F(CudaBackendTest, SaysWhatItIs) {
  MakeOn({.name = "NVIDIA H200", .major = 9, .minor = 0});
  EXPECT_EQ(backend_->name(), "cuda (NVIDIA H200, sm_90)");
  EXPECT_FALSE(backend_->is_simulated());
}

TEST_F(CudaBackendTest, WithoutADeviceThereIsNoBackend) {
  cuemu::SetDevice({.driver_version = 0});
  EXPECT_THAT(CudaBackend::Make(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("no CUDA driver")));
}

TEST_F(CudaBackendTest, ResultsArriveWithWaitAndNotBefore) {
  Merge merge(10);
  ASSERT_OK(Run(merge));
  EXPECT_THAT(merge.output, Each(-1.0F));

  ASSERT_OK(stream_->Wait());

  EXPECT_THAT(merge.output, Each(3.0F));
}

// What `merge` was given may go once Run returned: its copy is what is carried.
TEST_F(CudaBackendTest, InputsAreTakenBeforeRunReturns) {
  Merge merge(10);
  ASSERT_OK(Run(merge));
  merge.part.assign(10, 99.0F);

  ASSERT_OK(stream_->Wait());

  EXPECT_THAT(merge.output, Each(3.0F));
}

TEST_F(CudaBackendTest, BatchThatCarriesMuchWaitsForItselfAndIsWhole) {
  MakeOn({}, {.carried_bytes_max = 1000});
  std::vector<Merge> merges;
  std::vector<MergeArgs> lanes;
  for (int i = 0; i < 20; ++i) merges.emplace_back(100, static_cast<float>(i));
  for (Merge& merge : merges) lanes.push_back(merge.Args());

  ASSERT_OK(backend_->Run(*stream_, lanes));
  EXPECT_THAT(merges[0].output, Each(0.0F));  // Delivered on the way.
  EXPECT_THAT(merges[19].output, Each(-1.0F));
  ASSERT_OK(stream_->Wait());

  for (size_t i = 0; i < merges.size(); ++i) {
    EXPECT_THAT(merges[i].output, Each(static_cast<float>(i))) << i;
  }
}

TEST_F(CudaBackendTest, StreamsThatNobodyUsesKeepSoMuchAndNoMore) {
  Merge first(10);
  ASSERT_OK(Run(first));
  const size_t one = cuemu::DeviceBytesTaken();
  stream_.reset();
  ASSERT_GT(one, 0U);
  MakeOn({}, {.idle_bytes_max = 2 * one});
  std::vector<std::unique_ptr<Stream>> streams;
  std::vector<Merge> merges(4, Merge(10));
  for (Merge& merge : merges) {
    ASSERT_OK_AND_ASSIGN(streams.emplace_back(), backend_->MakeStream());
    ASSERT_OK(backend_->Run(*streams.back(), std::vector<MergeArgs>{merge.Args()}));
  }
  ASSERT_EQ(cuemu::DeviceBytesTaken(), 4 * one);

  streams.clear();

  EXPECT_EQ(cuemu::DeviceBytesTaken(), 2 * one);
}

TEST_F(CudaBackendTest, StreamsMemoryServesTheNextStream) {
  Merge merge(10);
  ASSERT_OK(Run(merge));
  stream_.reset();  // Nobody waited: its results are nobody's.
  EXPECT_THAT(merge.output, Each(-1.0F));
  const size_t taken = cuemu::DeviceBytesTaken();
  EXPECT_GT(taken, 0U);

  for (int i = 0; i < 5; ++i) {
    ASSERT_OK_AND_ASSIGN(stream_, backend_->MakeStream());
    ASSERT_OK(Run(merge));
    ASSERT_OK(stream_->Wait());
    EXPECT_THAT(merge.output, Each(3.0F));
    merge.lse.assign(10, -INFINITY);
    stream_.reset();
  }

  EXPECT_EQ(cuemu::DeviceBytesTaken(), taken);
}

TEST_F(CudaBackendTest, FullDeviceRefusesTheBatchAndLeavesItsResultsAlone) {
  MakeOn({.memory_bytes = 8 * kMiB});
  Merge small(10);
  ASSERT_OK(Run(small));
  Merge large(4 * kMiB);

  EXPECT_THAT(Run(large), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("memory of")));

  ASSERT_OK(stream_->Wait());
  EXPECT_THAT(small.output, Each(3.0F));
  EXPECT_EQ(large.output[0], -1.0F);
  Merge next(20);
  ASSERT_OK(Run(next));
  ASSERT_OK(stream_->Wait());
  EXPECT_THAT(next.output, Each(3.0F));
}

TEST_F(CudaBackendTest, LostDeviceIsUnavailableAndDeliversNothing) {
  Merge merge(10);
  ASSERT_OK(Run(merge));
  cuemu::BreakDevice();

  EXPECT_THAT(stream_->Wait(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("restart the daemon")));
  EXPECT_THAT(Run(merge), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(backend_->MakeStream().status(), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_THAT(backend_->Allocate(kMiB).status(), StatusIs(absl::StatusCode::kUnavailable));

  EXPECT_THAT(merge.output, Each(-1.0F));
}

TEST_F(CudaBackendTest, MemoryOutlivesTheBackend) {
  ASSERT_OK_AND_ASSIGN(DeviceBuffer buffer, backend_->Allocate(kMiB));
  stream_.reset();
  backend_.reset();
  buffer = DeviceBuffer();
  EXPECT_EQ(cuemu::DeviceBytesTaken(), 0U);
}

using CudaBackendDeathTest = test::ThreadsafeDeathTest;

TEST_F(CudaBackendDeathTest, ArrayHalfWithinAResultThatWasNotWaitedForStopsTheProcess) {
  const auto backend = *CudaBackend::Make();
  const auto stream = *backend->MakeStream();
  std::vector<float> numbers(30, 1.0F);
  Merge merge(10);
  MergeArgs args = merge.Args();
  args.output = std::span(numbers).first(10);
  ASSERT_OK(backend->Run(*stream, std::vector<MergeArgs>{args}));
  args.output = merge.output;
  args.part_output = std::span(numbers).subspan(5, 10);
  EXPECT_DEATH(backend->Run(*stream, std::vector<MergeArgs>{args}).IgnoreError(),
               "within a result that was not waited for, or apart from it");
}

}  // namespace
}  // namespace ebbtide::gpu
