// SPDX-License-Identifier: Apache-2.0
//
// The merge of two partial attentions: one warp for each row, its threads over the channels. All
// compute the row's weights, which costs less than handing them round.

#include "gpu/kernels/merge.h"

#include <vector>

#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/warp.cuh"

namespace ebbtide::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kBlockRows = kThreads / kWarpThreads;

struct Lane {
  const float* part_output;
  const float* part_lse;
  float* output;
  float* lse;
  int32_t rows;
  int32_t head_dim;
};

__device__ __forceinline__ void MergeRow(const Lane& lane, int row) {
  const double lse = lane.lse[row];
  const double part_lse = lane.part_lse[row];
  if (part_lse == -INFINITY) return;  // The part saw nothing.
  const double largest = fmax(lse, part_lse);
  const double mass = exp(lse - largest);
  const double part_mass = exp(part_lse - largest);
  const double weight = mass / (mass + part_mass);
  const double part_weight = part_mass / (mass + part_mass);
  const size_t first = static_cast<size_t>(row) * static_cast<size_t>(lane.head_dim);
  const int thread = static_cast<int>(threadIdx.x) % kWarpThreads;
  for (int d = thread; d < lane.head_dim; d += kWarpThreads) {
    const size_t at = first + static_cast<size_t>(d);
    lane.output[at] = static_cast<float>(weight * static_cast<double>(lane.output[at]) +
                                         part_weight * static_cast<double>(lane.part_output[at]));
  }
  __syncwarp();  // All have read the old one.
  if (thread == 0) lane.lse[row] = static_cast<float>(largest + log(mass + part_mass));
}

__global__ void __launch_bounds__(kThreads) MergeRows(const Lane* lanes, unsigned lane_blocks) {
  const Lane lane = lanes[LaneOf(lane_blocks)];
  const auto row = static_cast<int>(PartOf(lane_blocks) * kBlockRows + threadIdx.x / kWarpThreads);
  if (row < lane.rows) MergeRow(lane, row);
}

}  // namespace

absl::Status MergeCuda(std::span<const MergeArgs> lanes, CudaStream& stream) {
  std::vector<Lane> list;
  size_t rows = 0;
  for (const MergeArgs& args : lanes) {
    CheckMerge(args);
    rows = std::max(rows, args.lse.size());
    list.push_back({.part_output = args.part_output.data(),
                    .part_lse = args.part_lse.data(),
                    .output = args.output.data(),
                    .lse = args.lse.data(),
                    .rows = args.rows,
                    .head_dim = args.head_dim});
  }
  if (rows == 0) return absl::OkStatus();
  EBBTIDE_ASSIGN_OR_RETURN(const Lane* there, stream.Upload(std::span<const Lane>(list)));
  const unsigned blocks = BlocksOf(rows, kBlockRows);
  return Launch(stream,
                {.operation = "merge", .grid = GridOf(list.size(), blocks), .threads = kThreads},
                &MergeRows, there, blocks);
}

}  // namespace ebbtide::gpu
