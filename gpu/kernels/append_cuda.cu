// SPDX-License-Identifier: Apache-2.0
//
// New keys and values into slots: one warp for each row, which it copies and whose norm it adds up
// in f64 on the way. A worker's rows may start at any address, so those that 16-byte loads cannot
// take are read byte by byte.

#include "gpu/kernels/append.h"

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
  const std::byte* rows[2];  // Keys, values.
  float* norms[2];
  uint64_t stride;
  uint32_t first_slot;  // Of its keys in the list of slots; values follow.
  int32_t tokens;
  int32_t head_dim;
  int32_t row_bytes;
  Dtype dtype;
};

// The sum of squares of a row's elements, the same for every thread of the warp.
template <class T>
__device__ __forceinline__ double SumOfSquares(const std::byte* row, int head_dim, int thread) {
  double sum = 0;
  for (int d = thread; d < head_dim; d += kWarpThreads) {
    T element;  // At any address: byte by byte.
    memcpy(static_cast<void*>(&element), row + static_cast<size_t>(d) * sizeof(T), sizeof(T));
    const auto wide = static_cast<double>(Element<T>::Widen(element));
    sum += wide * wide;
  }
  return WarpJoin(sum, Plus{});
}

__global__ void __launch_bounds__(kThreads)
    AppendRows(const Lane* lanes, std::byte* const* slots, unsigned lane_blocks) {
  const Lane& lane = lanes[LaneOf(lane_blocks)];  // No copy: `half` picks among its arrays.
  const int thread = static_cast<int>(threadIdx.x) % kWarpThreads;
  const auto row = static_cast<int>(PartOf(lane_blocks) * kBlockRows + threadIdx.x / kWarpThreads);
  if (row >= 2 * lane.tokens) return;
  const int half = row / lane.tokens;
  const int token = row % lane.tokens;
  const std::byte* const from = lane.rows[half] + static_cast<size_t>(token) * lane.stride;
  CopyRow(slots[lane.first_slot + static_cast<uint32_t>(row)], from, lane.row_bytes, thread);
  double sum = 0;
  switch (lane.dtype) {
    case Dtype::kF32:
      sum = SumOfSquares<float>(from, lane.head_dim, thread);
      break;
    case Dtype::kF16:
      sum = SumOfSquares<__half>(from, lane.head_dim, thread);
      break;
    case Dtype::kBF16:
      sum = SumOfSquares<__nv_bfloat16>(from, lane.head_dim, thread);
      break;
  }
  // As NormFromSquares (norm.h): the margin covers the sum's own rounding.
  if (thread == 0) lane.norms[half][token] = __double2float_ru(sqrt(sum) * (1 + 1e-13));
}

}  // namespace

absl::Status AppendCuda(std::span<const AppendArgs> lanes, CudaStream& stream) {
  std::vector<Lane> list;
  std::vector<std::byte*> slots;
  size_t tokens = 0;
  for (const AppendArgs& args : lanes) {
    CheckAppend(args);
    tokens = std::max(tokens, args.key_slot.size());
    list.push_back({.rows = {args.key, args.value},
                    .norms = {args.key_norm.data(), args.value_norm.data()},
                    .stride = args.stride,
                    .first_slot = static_cast<uint32_t>(slots.size()),
                    .tokens = args.tokens,
                    .head_dim = args.head_dim,
                    .row_bytes = args.head_dim * static_cast<int32_t>(DtypeBytes(args.dtype)),
                    .dtype = args.dtype});
    slots.insert(slots.end(), args.key_slot.begin(), args.key_slot.end());
    slots.insert(slots.end(), args.value_slot.begin(), args.value_slot.end());
  }
  if (tokens == 0) return absl::OkStatus();
  EBBTIDE_ASSIGN_OR_RETURN(const Lane* there, stream.Upload(std::span<const Lane>(list)));
  EBBTIDE_ASSIGN_OR_RETURN(std::byte* const* slots_there,
                           stream.Upload(std::span<std::byte* const>(slots)));
  const unsigned blocks = BlocksOf(2 * tokens, kBlockRows);
  return Launch(stream,
                {.operation = "append", .grid = GridOf(list.size(), blocks), .threads = kThreads},
                &AppendRows, there, slots_there, blocks);
}

}  // namespace ebbtide::gpu
