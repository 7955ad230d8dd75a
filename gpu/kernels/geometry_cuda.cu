// SPDX-License-Identifier: Apache-2.0
//
// KeyDiff in two launches, a block for each 256 slots of a lane. The first adds up unit keys in
// f64, threads over channels; the lane's last block joins its splits in their order and leaves a
// unit anchor. The second takes the cosine of each key with it. Keys are read twice, which the
// formula asks.

#include "gpu/kernels/geometry.h"

#include <vector>

#include "gpu/cuda/kernels.h"
#include "gpu/cuda/lanes.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/rows.cuh"
#include "gpu/cuda/splits.cuh"
#include "gpu/cuda/warp.cuh"

namespace ebbtide::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kInFlight = 4;
constexpr int kMine = kHeadDimMax / kThreads;  // Channels of a thread once splits are joined.

struct Lane {
  float* score;
  uint32_t slots;
  uint32_t first_split;  // Of its splits' sums.
  int32_t head_dim;
};

struct View {
  const Lane* lanes;
  const PlacedExtent* extents;
  const Split* splits;
  unsigned* tickets;  // [lane]
  double* sums;       // [split, head_dim] of unit keys
  unsigned* counts;   // [split] keys that have a direction
  float* anchors;     // [lane, head_dim] of length 1, or zeros
};

__device__ void FindKeys(const View& view, const Split& split, int head_dim, size_t element_bytes,
                         const std::byte** key) {
  for (int s = static_cast<int>(threadIdx.x); s < kSplitSlots; s += kThreads) key[s] = nullptr;
  __syncthreads();
  const size_t row_bytes = static_cast<size_t>(head_dim) * element_bytes;
  ForEachSlot(view.extents, split, [&](int s, const Extent& extent, int i) {
    if (extent.index[i] != kNoToken) key[s] = extent.key + static_cast<size_t>(i) * row_bytes;
  });
  __syncthreads();
}

// The sum over the threads that share a row, the same for each.
template <int kWidth>
__device__ __forceinline__ float RowSum(float value) {
#pragma unroll
  for (int distance = kWidth / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kWholeWarp, value, distance);
  }
  return value;
}

template <class Shape>
struct Shared {
  const std::byte* key[kSplitSlots];
  double across[kWarps * Shape::kHeadDimMax];
  double length[kWarps];
  unsigned count[kWarps];
  bool is_last;
};

// Joins a lane's splits into its anchor.
template <class Shape>
__device__ void JoinAnchor(const View& view, const Lane& lane, const Split& split,
                           Shared<Shape>& shared) {
  const int t = static_cast<int>(threadIdx.x);
  const auto dim = static_cast<size_t>(lane.head_dim);
  unsigned count = 0;
  double sum[kMine] = {};
  double squares = 0;
  for (uint32_t x = 0; x < split.count; ++x) count += __ldcg(&view.counts[lane.first_split + x]);
#pragma unroll
  for (int mine = 0; mine < kMine; ++mine) {
    const int d = t + mine * kThreads;
    if (d >= lane.head_dim) continue;
    for (uint32_t x = 0; x < split.count; ++x) {
      sum[mine] += __ldcg(&view.sums[(lane.first_split + x) * dim + static_cast<size_t>(d)]);
    }
    squares += sum[mine] * sum[mine];
  }
  squares = WarpJoin(squares, Plus{});
  if (t % kWarpThreads == 0) shared.length[t / kWarpThreads] = squares;
  __syncthreads();
  double length = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) length += shared.length[w];
  length = sqrt(length);
  const bool has_direction = length > kAnchorMin * static_cast<double>(count);
#pragma unroll
  for (int mine = 0; mine < kMine; ++mine) {
    const int d = t + mine * kThreads;
    if (d >= lane.head_dim) continue;
    view.anchors[split.lane * dim + static_cast<size_t>(d)] =
        has_direction ? static_cast<float>(sum[mine] / length) : 0.0F;
  }
}

template <class Shape>
__global__ void __launch_bounds__(kThreads, 4) SumUnitKeys(const View view) {
  __shared__ Shared<Shape> shared;
  constexpr int kWidth = Shape::kWidth;
  constexpr int kGroups = kThreads / kWidth;
  const Split split = view.splits[blockIdx.x];
  const Lane lane = view.lanes[split.lane];
  const int t = static_cast<int>(threadIdx.x);
  const int part = t % kWidth;
  const int slots = SlotsOf(split, lane.slots);
  FindKeys(view, split, lane.head_dim, sizeof(typename Shape::Type), shared.key);
  double sum[Shape::kElements] = {};
  unsigned count = 0;
  for (int base = 0; base < slots; base += kGroups * kInFlight) {
    typename Shape::Raw raw[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      raw[u] = Shape::Load(shared.key[base + u * kGroups + t / kWidth], lane.head_dim, part);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      float key[Shape::kElements];
      Shape::Widen(raw[u], key);
      float squares = 0;
#pragma unroll
      for (int e = 0; e < Shape::kElements; ++e) squares = fmaf(key[e], key[e], squares);
      squares = RowSum<kWidth>(squares);
      if (squares == 0) continue;  // No direction, or no key.
      const float inverse = 1.0F / sqrtf(squares);
      if (part == 0) ++count;
#pragma unroll
      for (int e = 0; e < Shape::kElements; ++e) sum[e] += static_cast<double>(key[e] * inverse);
    }
  }
#pragma unroll
  for (int e = 0; e < Shape::kElements; ++e) {
#pragma unroll
    for (int distance = kWidth; distance < kWarpThreads; distance *= 2) {
      sum[e] += __shfl_xor_sync(kWholeWarp, sum[e], distance);
    }
    if (t % kWarpThreads < kWidth) {
      shared.across[t / kWarpThreads * Shape::kHeadDimMax + Shape::DimOf(part, e)] = sum[e];
    }
  }
  count = WarpJoin(count, Plus{});
  if (t % kWarpThreads == 0) shared.count[t / kWarpThreads] = count;
  __syncthreads();
  const size_t at = lane.first_split + split.number;
  for (int d = t; d < lane.head_dim; d += kThreads) {
    double joined = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) joined += shared.across[w * Shape::kHeadDimMax + d];
    view.sums[at * static_cast<size_t>(lane.head_dim) + static_cast<size_t>(d)] = joined;
  }
  if (t == 0)
    view.counts[at] = shared.count[0] + shared.count[1] + shared.count[2] + shared.count[3];
  if (IsLastBlock(view.tickets + split.lane, split.count, &shared.is_last)) {
    JoinAnchor<Shape>(view, lane, split, shared);
  }
}

template <class Shape>
__global__ void __launch_bounds__(kThreads, 8) ScoreKeys(const View view) {
  __shared__ const std::byte* shared_key[kSplitSlots];
  constexpr int kWidth = Shape::kWidth;
  constexpr int kGroups = kThreads / kWidth;
  const Split split = view.splits[blockIdx.x];
  const Lane lane = view.lanes[split.lane];
  const int t = static_cast<int>(threadIdx.x);
  const int part = t % kWidth;
  const int slots = SlotsOf(split, lane.slots);
  FindKeys(view, split, lane.head_dim, sizeof(typename Shape::Type), shared_key);
  float anchor[Shape::kElements];
  Shape::LoadFloats(
      view.anchors + static_cast<size_t>(split.lane) * static_cast<size_t>(lane.head_dim),
      lane.head_dim, part, anchor);
  float* const score = lane.score + static_cast<size_t>(split.number) * kSplitSlots;
  for (int base = 0; base < slots; base += kGroups * kInFlight) {
    typename Shape::Raw raw[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      raw[u] = Shape::Load(shared_key[base + u * kGroups + t / kWidth], lane.head_dim, part);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int s = base + u * kGroups + t / kWidth;
      float key[Shape::kElements];
      Shape::Widen(raw[u], key);
      float squares = 0;
      float product = 0;
#pragma unroll
      for (int e = 0; e < Shape::kElements; ++e) {
        squares = fmaf(key[e], key[e], squares);
        product = fmaf(key[e], anchor[e], product);
      }
      squares = RowSum<kWidth>(squares);
      product = RowSum<kWidth>(product);
      if (part == 0 && s < slots) score[s] = squares == 0 ? 0.0F : 0.0F - product / sqrtf(squares);
    }
  }
}

absl::Status RunShape(std::span<const GeometryArgs* const> lanes, CudaStream& stream) {
  std::vector<Lane> list;
  std::vector<PlacedExtent> extents;
  std::vector<Split> splits;
  for (const GeometryArgs* args : lanes) {
    const auto lane = static_cast<uint32_t>(list.size());
    const size_t row_bytes = RowBytes(args->dtype, args->head_dim);
    const LaneSplits placed = PlaceExtents(args->extents, row_bytes, extents);
    list.push_back({.score = args->score.data(),
                    .slots = placed.slots,
                    .first_split = static_cast<uint32_t>(splits.size()),
                    .head_dim = args->head_dim});
    AddSplits(lane, placed, splits);
  }
  const auto dim = static_cast<size_t>(lanes[0]->head_dim);
  View view = {};
  EBBTIDE_ASSIGN_OR_RETURN(view.lanes, stream.Upload(std::span<const Lane>(list)));
  EBBTIDE_ASSIGN_OR_RETURN(view.extents, stream.Upload(std::span<const PlacedExtent>(extents)));
  EBBTIDE_ASSIGN_OR_RETURN(view.splits, stream.Upload(std::span<const Split>(splits)));
  EBBTIDE_ASSIGN_OR_RETURN(view.tickets, stream.UploadZeros<unsigned>(list.size()));
  EBBTIDE_ASSIGN_OR_RETURN(view.sums, stream.Scratch<double>(splits.size() * dim));
  EBBTIDE_ASSIGN_OR_RETURN(view.counts, stream.Scratch<unsigned>(splits.size()));
  EBBTIDE_ASSIGN_OR_RETURN(view.anchors, stream.Scratch<float>(list.size() * dim));
  return WithRowShape(lanes[0]->dtype, lanes[0]->head_dim, [&](auto shape) {
    using Shape = decltype(shape);
    const LaunchShape grid = {
        .operation = "geometry", .grid = GridOf(splits.size(), 1), .threads = kThreads};
    EBBTIDE_RETURN_IF_ERROR(Launch(stream, grid, &SumUnitKeys<Shape>, view));
    return Launch(stream, grid, &ScoreKeys<Shape>, view);
  });
}

}  // namespace

absl::Status KeyDiffCuda(std::span<const GeometryArgs> lanes, CudaStream& stream) {
  for (const GeometryArgs& args : lanes) CheckGeometry(args);
  return ForEachShape(
      lanes, [&](std::span<const GeometryArgs* const> group) { return RunShape(group, stream); });
}

}  // namespace ebbtide::gpu
