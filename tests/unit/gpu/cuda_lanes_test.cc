// SPDX-License-Identifier: Apache-2.0
//
// What CUDA adds to the contracts: many lanes in one launch. A lane's bits are the same alone, in
// any company and in any order of blocks and threads. Each kernel's own contract is held by the
// tests that the CPU's pass too.

#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/kernels/attend.h"
#include "tests/cuemu/machine.h"
#include "tests/support/random_seed.h"
#include "tests/unit/gpu/on_cuda.h"
#include "tests/unit/gpu/sample_lane.h"

namespace ebbtide::gpu {
namespace {

class CudaLanesTest : public testing::Test {
 protected:
  ~CudaLanesTest() override { cuemu::SetSeed(0); }
};

// A lane of its own shape, and room for its answer.
struct AttendCall {
  AttendCall(Dtype dtype, int head_dim, int slots, int queries_in, std::mt19937_64& random)
      : lane({.dtype = dtype,
              .head_dim = head_dim,
              .slots = slots,
              .extent_slots = 20,
              .empty_one_in = 6,
              .poison_empty = true},
             random),
        queries(queries_in) {
    std::normal_distribution<float> normal;
    const size_t rows = 2 * static_cast<size_t>(queries);
    for (size_t i = 0; i < rows * lane.dim(); ++i) query.push_back(normal(random));
    for (int m = 0; m < queries; ++m) query_index.push_back(slots - queries + m);
    output.resize(query.size());
    lse.resize(rows);
    logits.resize(rows * lane.slots());
  }

  AttendArgs Args() {
    return {.dtype = lane.options().dtype,
            .head_dim = lane.options().head_dim,
            .group = 2,
            .queries = queries,
            .scale = 0.125F,
            .extents = lane.extents(),
            .query = query,
            .query_index = query_index,
            .output = output,
            .lse = lse,
            .logits = logits};
  }

  SampleLane lane;
  int queries;
  std::vector<float> query;
  std::vector<int32_t> query_index;
  std::vector<float> output, lse, logits;
};

TEST_F(CudaLanesTest, AttendGivesALaneTheSameBitsAloneAndInAnyCompanyAndOrder) {
  std::mt19937_64 random(test::RandomSeed());
  std::vector<std::unique_ptr<AttendCall>> calls;
  const auto add = [&](Dtype dtype, int head_dim, int slots, int queries) {
    calls.push_back(std::make_unique<AttendCall>(dtype, head_dim, slots, queries, random));
  };
  add(Dtype::kF16, 64, 1, 1);
  add(Dtype::kF16, 64, 700, 1);
  add(Dtype::kF16, 64, 1100, 7);
  add(Dtype::kF32, 80, 257, 2);
  add(Dtype::kF16, 64, 512, 0);
  add(Dtype::kF16, 33, 300, 1);
  std::vector<AttendArgs> together;
  std::vector<std::vector<float>> alone;
  for (const auto& call : calls) {
    AttendOnCuda(call->Args());
    for (const std::vector<float>* answer : {&call->output, &call->lse, &call->logits}) {
      alone.push_back(*answer);
    }
    together.push_back(call->Args());
  }

  for (const uint32_t seed : {0U, 1U, 2U}) {
    cuemu::SetSeed(seed);
    for (const auto& call : calls) call->output.assign(call->output.size(), -1.0F);
    RunOnCuda<AttendArgs>(&AttendCuda, together);

    for (size_t i = 0; i < calls.size(); ++i) {
      EXPECT_EQ(calls[i]->output, alone[3 * i]) << "lane " << i << " seed " << seed;
      EXPECT_EQ(calls[i]->lse, alone[3 * i + 1]) << "lane " << i << " seed " << seed;
      EXPECT_EQ(calls[i]->logits, alone[3 * i + 2]) << "lane " << i << " seed " << seed;
    }
  }
}

}  // namespace
}  // namespace ebbtide::gpu
