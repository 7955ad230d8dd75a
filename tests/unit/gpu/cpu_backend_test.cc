// SPDX-License-Identifier: Apache-2.0
//
// What the simulated device promises beyond backend.h: its memory is this process's, and batches
// give the bits of the kernels called alone, for any number of threads.

#include "gpu/cpu/cpu_backend.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "gpu/cpu/attend_part.h"
#include "gpu/cpu/simd_targets.h"
#include "tests/support/random_seed.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/gpu/sample_lane.h"

namespace ebbtide::gpu {
namespace {

using test::StatusIs;
using testing::HasSubstr;

class CpuBackendTest : public testing::TestWithParam<int> {
 protected:
  void Run(const Batch& batch) {
    ASSERT_OK_AND_ASSIGN(const std::unique_ptr<Stream> stream, backend_.MakeStream());
    ASSERT_OK(backend_.Run(*stream, batch));
    ASSERT_OK(stream->Wait());
  }

  CpuBackend backend_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Threads, CpuBackendTest, testing::Values(1, 2, 3, 8),
                         testing::PrintToStringParamName());

TEST_P(CpuBackendTest, SaysWhatItIs) {
  EXPECT_EQ(backend_.name(), "cpu (" + std::string(ChosenSimdTarget()) + ")");
  EXPECT_TRUE(backend_.is_simulated());
}

TEST_P(CpuBackendTest, MemoryIsZeroedAndAlignedAndOurs) {
  ASSERT_OK_AND_ASSIGN(DeviceBuffer buffer, backend_.Allocate((size_t{5} << 20) + 12345));
  const std::span<std::byte> bytes = buffer.bytes();

  EXPECT_EQ(bytes.size(), (size_t{5} << 20) + 12345);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(bytes.data()) % (size_t{2} << 20), 0U);
  EXPECT_TRUE(
      std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{}; }));
  std::memset(bytes.data(), 0xA5, bytes.size());

  DeviceBuffer moved = std::move(buffer);
  EXPECT_EQ(moved.bytes().data(), bytes.data());
  EXPECT_EQ(moved.bytes().back(), std::byte{0xA5});
  moved = DeviceBuffer();
  EXPECT_TRUE(moved.bytes().empty());
}

TEST_P(CpuBackendTest, MemoryThatNoMachineHasIsRefused) {
  EXPECT_THAT(backend_.Allocate(size_t{1} << 52).status(),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("device budget")));
}

// A lane, its queries and room for the answer.
struct Attend {
  Attend(const SampleLane::Options& options, int group_in, int queries_in, std::mt19937_64& random)
      : lane(options, random), group(group_in), queries(queries_in) {
    std::normal_distribution<float> normal;
    const auto rows = static_cast<size_t>(group * queries);
    query.resize(rows * lane.dim());
    for (float& element : query) element = normal(random);
    for (int m = 0; m < queries; ++m) {
      query_index.push_back(static_cast<int32_t>(lane.slots()) - queries + m);
    }
  }
  struct Answer {
    std::vector<float> output, lse, logits, part_output, part_lse;
    friend bool operator==(const Answer&, const Answer&) = default;
  };
  AttendArgs Into(Answer& answer) const {
    answer.output.assign(query.size(), -1);
    answer.lse.assign(query.size() / lane.dim(), -1);
    answer.logits.assign(answer.lse.size() * lane.slots(), -1);
    answer.part_lse.assign(with_parts ? lane.extents().size() * answer.lse.size() : 0, -1);
    answer.part_output.assign(answer.part_lse.size() * lane.dim(), -1);
    return {.dtype = lane.options().dtype,
            .head_dim = lane.options().head_dim,
            .group = group,
            .queries = queries,
            .scale = 0.125F,
            .extents = lane.extents(),
            .query = query,
            .query_index = query_index,
            .output = answer.output,
            .lse = answer.lse,
            .logits = answer.logits,
            .part_output = answer.part_output,
            .part_lse = answer.part_lse};
  }

  SampleLane lane;
  int group;
  int queries;
  bool with_parts = false;
  std::vector<float> query;
  std::vector<int32_t> query_index;
};

// Short and long lanes together: some are run whole, others run by run.
TEST_P(CpuBackendTest, AttendGivesTheBitsOfEachLaneAloneForAnyNumberOfThreads) {
  std::mt19937_64 random(test::RandomSeed());
  std::vector<std::unique_ptr<Attend>> attends;
  const auto add = [&](int slots, int group, int queries, bool with_parts) {
    attends.push_back(std::make_unique<Attend>(
        SampleLane::Options{.head_dim = 40, .slots = slots, .empty_one_in = 9}, group, queries,
        random));
    attends.back()->with_parts = with_parts;
  };
  constexpr int kRun = static_cast<int>(kAttendRunSlots);
  for (const bool with_parts : {false, true}) {
    add(20 * kRun + 77, 2, 1, with_parts);
    add(100, 4, 1, with_parts);
    add(2 * kRun, 3, 50, with_parts);  // Three blocks of rows.
    add(1, 1, 1, with_parts);
  }
  std::vector<Attend::Answer> alone(attends.size());
  std::vector<Attend::Answer> together(attends.size());
  std::vector<AttendArgs> batch;
  for (size_t i = 0; i < attends.size(); ++i) {
    AttendCpu(attends[i]->Into(alone[i]));
    batch.push_back(attends[i]->Into(together[i]));
  }

  Run(batch);

  for (size_t i = 0; i < attends.size(); ++i) EXPECT_EQ(together[i], alone[i]) << i;
}

TEST_P(CpuBackendTest, OneLongLaneIsSharedAndGivesTheSameBits) {
  std::mt19937_64 random(test::RandomSeed());
  Attend attend({.head_dim = 24, .slots = 40 * static_cast<int>(kAttendRunSlots)}, 1, 1, random);
  for (const bool with_parts : {false, true}) {
    attend.with_parts = with_parts;
    Attend::Answer alone, together;
    AttendCpu(attend.Into(alone));

    const std::vector<AttendArgs> batch = {attend.Into(together)};
    Run(batch);

    EXPECT_EQ(together, alone);
  }
}

TEST_P(CpuBackendTest, CallersShareItWithoutMixingTheirAnswers) {
  std::mt19937_64 random(test::RandomSeed());
  const Attend first({.head_dim = 64, .slots = 5000}, 2, 1, random);
  const Attend second({.head_dim = 32, .slots = 7000}, 1, 3, random);
  const auto expect_bits = [&](const Attend& attend) {
    Attend::Answer alone, together;
    AttendCpu(attend.Into(alone));
    for (int call = 0; call < 10; ++call) {
      const std::vector<AttendArgs> batch = {
          attend.Into(together),
      };
      Run(batch);
      EXPECT_EQ(together, alone);
    }
  };

  std::jthread other(expect_bits, std::cref(first));
  expect_bits(second);
}

}  // namespace
}  // namespace ebbtide::gpu
