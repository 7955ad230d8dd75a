// SPDX-License-Identifier: Apache-2.0
//
// Slots into a page: one warp for each row of it, keys and values alike.

#include "gpu/kernels/gather.h"

#include <vector>

#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/rows.cuh"
#include "gpu/cuda/warp.cuh"

namespace ebbtide::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kBlockRows = kThreads / kWarpThreads;

struct Lane {
  std::byte* page;
  uint32_t first_slot;  // Keys of its tokens in the list of slots, then values.
  int32_t filled;
  int32_t tokens;
  int32_t row_bytes;
};

__global__ void __launch_bounds__(kThreads)
    GatherRows(const Lane* lanes, const std::byte* const* slots, unsigned lane_blocks) {
  const Lane lane = lanes[LaneOf(lane_blocks)];
  const int thread = static_cast<int>(threadIdx.x) % kWarpThreads;
  const auto row = static_cast<int>(PartOf(lane_blocks) * kBlockRows + threadIdx.x / kWarpThreads);
  if (row >= 2 * lane.tokens) return;
  const int half = row / lane.tokens;  // 0: keys, 1: values
  const int token = row % lane.tokens;
  const std::byte* const from =
      token < lane.filled
          ? slots[lane.first_slot + static_cast<uint32_t>(half * lane.filled + token)]
          : nullptr;
  CopyRow(lane.page + static_cast<size_t>(row) * static_cast<size_t>(lane.row_bytes), from,
          lane.row_bytes, thread);
}

}  // namespace

absl::Status GatherCuda(std::span<const GatherArgs> lanes, CudaStream& stream) {
  std::vector<Lane> list;
  std::vector<const std::byte*> slots;
  size_t tokens = 0;
  for (const GatherArgs& args : lanes) {
    CheckGather(args);
    tokens = std::max(tokens, static_cast<size_t>(args.shape.tokens));
    list.push_back({.page = args.page.data(),
                    .first_slot = static_cast<uint32_t>(slots.size()),
                    .filled = static_cast<int32_t>(args.key_slot.size()),
                    .tokens = args.shape.tokens,
                    .row_bytes = static_cast<int32_t>(args.shape.row_bytes())});
    slots.insert(slots.end(), args.key_slot.begin(), args.key_slot.end());
    slots.insert(slots.end(), args.value_slot.begin(), args.value_slot.end());
  }
  if (tokens == 0) return absl::OkStatus();
  EBBTIDE_ASSIGN_OR_RETURN(const Lane* there, stream.Upload(std::span<const Lane>(list)));
  EBBTIDE_ASSIGN_OR_RETURN(const std::byte* const* slots_there,
                           stream.Upload(std::span<const std::byte* const>(slots)));
  const unsigned blocks = BlocksOf(2 * tokens, kBlockRows);
  return Launch(stream,
                {.operation = "gather", .grid = GridOf(list.size(), blocks), .threads = kThreads},
                &GatherRows, there, slots_there, blocks);
}

}  // namespace ebbtide::gpu
