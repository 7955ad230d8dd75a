// SPDX-License-Identifier: Apache-2.0
//
// A decode step of all lanes as a GPU wants it: three launches, none of them waited for, which a
// graph repeats with new tokens and queries. Its stream is the graph's alone.

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/cuda/cuda_stream.h"
#include "gpu/cuda/kernels.h"
#include "tests/cuemu/machine.h"
#include "tests/support/random_seed.h"
#include "tests/support/status_matchers.h"
#include "tests/unit/gpu/sample_lane.h"

namespace ebbtide::gpu {
namespace {

constexpr int kGroup = 4;
constexpr int kHeadDim = 64;

// One lane of a step: its new token takes the last slot, its queries see all, and all attention
// counts (h2o).
struct StepLane {
  StepLane(int slots, std::mt19937_64& random)
      : lane({.dtype = Dtype::kBF16, .head_dim = kHeadDim, .slots = slots}, random),
        query(static_cast<size_t>(kGroup * kHeadDim)),
        query_index(1, slots),
        key(kHeadDim * DtypeBytes(Dtype::kBF16)),
        value(key.size()),
        output(query.size()),
        lse(kGroup),
        logits(kGroup * lane.slots()),
        mass(lane.slots()) {
    const Extent& last = lane.extents().back();
    const size_t offset = (static_cast<size_t>(last.slots) - 1) * key.size();
    // The lane lends its memory as const; it is the test's own.
    key_slot = const_cast<std::byte*>(last.key) + offset;
    value_slot = const_cast<std::byte*>(last.value) + offset;
  }

  // What the next step brings.
  void Renew(std::mt19937_64& random) {
    std::normal_distribution<float> normal;
    for (float& x : query) x = normal(random);
    for (int d = 0; d < kHeadDim; ++d) {
      StoreElement(Dtype::kBF16, key.data(), d, normal(random));
      StoreElement(Dtype::kBF16, value.data(), d, normal(random));
    }
  }

  SampleLane lane;
  std::vector<float> query;
  std::vector<int32_t> query_index;
  std::vector<std::byte> key, value;
  std::byte* key_slot = nullptr;
  std::byte* value_slot = nullptr;
  float key_norm = 0;
  float value_norm = 0;
  std::vector<float> output, lse, logits;
  std::vector<double> mass;
};

class Step {
 public:
  explicit Step(uint64_t seed) : random_(seed) {
    for (const int slots : {700, 1, 256, 33, 1025}) {
      lanes_.push_back(std::make_unique<StepLane>(slots, random_));
    }
  }

  void Renew() {
    for (const auto& lane : lanes_) lane->Renew(random_);
  }

  // Appends, attends and adds up what each token drew.
  void Run(CudaStream& stream) {
    std::vector<AppendArgs> appends;
    std::vector<AttendArgs> attends;
    std::vector<MassArgs> masses;
    for (const auto& lane : lanes_) {
      appends.push_back({.dtype = Dtype::kBF16,
                         .head_dim = kHeadDim,
                         .tokens = 1,
                         .key = lane->key.data(),
                         .value = lane->value.data(),
                         .stride = lane->key.size(),
                         .key_slot = {&lane->key_slot, 1},
                         .value_slot = {&lane->value_slot, 1},
                         .key_norm = {&lane->key_norm, 1},
                         .value_norm = {&lane->value_norm, 1}});
      attends.push_back({.dtype = Dtype::kBF16,
                         .head_dim = kHeadDim,
                         .group = kGroup,
                         .scale = 0.125F,
                         .extents = lane->lane.extents(),
                         .query = lane->query,
                         .query_index = lane->query_index,
                         .output = lane->output,
                         .lse = lane->lse,
                         .logits = lane->logits});
      masses.push_back({.group = kGroup,
                        .slots = static_cast<int>(lane->lane.slots()),
                        .logits = lane->logits,
                        .lse = lane->lse,
                        .mass = lane->mass});
    }
    EXPECT_OK(AppendCuda(appends, stream));
    EXPECT_OK(AttendCuda(attends, stream));
    EXPECT_OK(MassCuda(masses, stream));
  }

  bool operator==(const Step& other) const {
    return std::ranges::equal(lanes_, other.lanes_, [](const auto& a, const auto& b) {
      return a->output == b->output && a->lse == b->lse && a->mass == b->mass &&
             a->key_norm == b->key_norm;
    });
  }

 private:
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<StepLane>> lanes_;
};

TEST(CudaStepTest, IsThreeLaunchesThatAGraphRepeatsOnAStreamOfItsOwn) {
  const uint64_t seed = test::RandomSeed();
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<CudaStream> stream, CudaStream::Make());
  ASSERT_OK_AND_ASSIGN(const std::unique_ptr<CudaStream> other, CudaStream::Make());
  Step eager(seed);
  Step graphed(seed);
  Step warm(seed);  // The stream's memory has grown by then, as it has on a running device.
  warm.Run(*stream);
  ASSERT_OK(stream->Wait());

  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream->handle(), cudaStreamCaptureModeThreadLocal),
            cudaSuccess);
  graphed.Run(*stream);
  ASSERT_EQ(cudaStreamEndCapture(stream->handle(), &graph), cudaSuccess)
      << "something in a step waits or allocates";
  ASSERT_EQ(cudaGraphInstantiate(&ready, graph, 0), cudaSuccess);
  for (int step = 0; step < 3; ++step) {
    graphed.Renew();
    const uint64_t before = cuemu::GridsRun();
    ASSERT_EQ(cudaGraphLaunch(ready, stream->handle()), cudaSuccess);
    eager.Renew();
    eager.Run(*other);
    ASSERT_OK(other->Wait());
    ASSERT_EQ(cudaStreamSynchronize(stream->handle()), cudaSuccess);
    EXPECT_EQ(cuemu::GridsRun() - before, 3U + 3U);
    EXPECT_TRUE(graphed == eager) << step;
  }
  ASSERT_EQ(cudaGraphExecDestroy(ready), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

}  // namespace
}  // namespace ebbtide::gpu
