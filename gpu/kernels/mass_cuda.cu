// SPDX-License-Identifier: Apache-2.0
//
// Attention drawn by each slot: one thread for each, over all rows of logits, so that neighbours
// read neighbours. Sums are f64, as many as logits: an H100 adds them at half the rate of f32,
// which is more than memory delivers. And SnapKV's pooling, one thread for each token.

#include "gpu/kernels/mass.h"

#include <vector>

#include "base/status_macros.h"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/warp.cuh"

namespace ebbtide::gpu {
namespace {

constexpr int kThreads = 256;

struct MassLane {
  const float* logits;
  const float* lse;
  double* mass;
  int32_t rows;
  int32_t slots;
  int32_t group;
};

__global__ void __launch_bounds__(kThreads) AddMass(const MassLane* lanes, unsigned lane_blocks) {
  const MassLane lane = lanes[LaneOf(lane_blocks)];
  const auto s = static_cast<int>(PartOf(lane_blocks) * kThreads + threadIdx.x);
  if (s >= lane.slots) return;
  const float* logit = lane.logits + s;
  double sum = 0;
#pragma unroll 4
  for (int row = 0; row < lane.rows; ++row, logit += lane.slots) {
    const float lse = lane.lse[row];
    if (lse != -INFINITY) sum += static_cast<double>(Exp(__ldcs(logit) - lse));
  }
  lane.mass[s] += sum / static_cast<double>(lane.group);
}

struct PoolLane {
  const float* mass;
  float* pooled;
  int32_t tokens;
  int32_t kernel;
};

template <bool kIsAverage>
__global__ void __launch_bounds__(kThreads) Pool(const PoolLane* lanes, unsigned lane_blocks) {
  const PoolLane lane = lanes[LaneOf(lane_blocks)];
  const auto token = static_cast<int>(PartOf(lane_blocks) * kThreads + threadIdx.x);
  if (token >= lane.tokens) return;
  const int reach = lane.kernel / 2;
  const int first = max(token - reach, 0);
  const int last = min(token + reach, lane.tokens - 1);
  float largest = lane.mass[first];
  double sum = 0;
  for (int j = first; j <= last; ++j) {
    largest = fmaxf(largest, lane.mass[j]);
    sum += static_cast<double>(lane.mass[j]);
  }
  lane.pooled[token] =
      kIsAverage ? static_cast<float>(sum / static_cast<double>(lane.kernel)) : largest;
}

absl::Status RunPool(std::span<const PoolArgs> lanes, CudaStream& stream,
                     void (*kernel)(const PoolLane*, unsigned)) {
  std::vector<PoolLane> list;
  size_t tokens = 0;
  for (const PoolArgs& args : lanes) {
    CheckPool(args);
    tokens = std::max(tokens, args.mass.size());
    list.push_back({.mass = args.mass.data(),
                    .pooled = args.pooled.data(),
                    .tokens = static_cast<int32_t>(args.mass.size()),
                    .kernel = args.kernel});
  }
  if (tokens == 0) return absl::OkStatus();
  EBBTIDE_ASSIGN_OR_RETURN(const PoolLane* there, stream.Upload(std::span<const PoolLane>(list)));
  const unsigned blocks = BlocksOf(tokens, kThreads);
  return Launch(stream,
                {.operation = "pool", .grid = GridOf(list.size(), blocks), .threads = kThreads},
                kernel, there, blocks);
}

}  // namespace

absl::Status MassCuda(std::span<const MassArgs> lanes, CudaStream& stream) {
  std::vector<MassLane> list;
  size_t slots = 0;
  for (const MassArgs& args : lanes) {
    CheckMass(args);
    slots = std::max(slots, args.mass.size());
    list.push_back({.logits = args.logits.data(),
                    .lse = args.lse.data(),
                    .mass = args.mass.data(),
                    .rows = static_cast<int32_t>(args.lse.size()),
                    .slots = args.slots,
                    .group = args.group});
  }
  if (slots == 0) return absl::OkStatus();
  EBBTIDE_ASSIGN_OR_RETURN(const MassLane* there, stream.Upload(std::span<const MassLane>(list)));
  const unsigned blocks = BlocksOf(slots, kThreads);
  return Launch(stream,
                {.operation = "mass", .grid = GridOf(list.size(), blocks), .threads = kThreads},
                &AddMass, there, blocks);
}

absl::Status MaxPoolCuda(std::span<const PoolArgs> lanes, CudaStream& stream) {
  return RunPool(lanes, stream, &Pool<false>);
}
absl::Status AveragePoolCuda(std::span<const PoolArgs> lanes, CudaStream& stream) {
  return RunPool(lanes, stream, &Pool<true>);
}

}  // namespace ebbtide::gpu
