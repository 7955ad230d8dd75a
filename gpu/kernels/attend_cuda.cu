// SPDX-License-Identifier: Apache-2.0
//
// Attention, split over the slots of a lane. One block takes 256 slots for a tile of up to 8 rows:
// keys, softmax within the split, values; the block of a tile that finishes last merges its splits
// in their order, in f64. Which block that is, how many there are and what else runs change no bit.
//
// A row of 16-byte pieces is shared by 8 to 32 threads, four rows in flight for each, so that one
// pass over K and V keeps the memory busy; dot products of all rows in flight are reduced together.
// Expected: bound by memory up to 4 rows, by instructions at 8 (docs/benchmarks.md).
//
// Where each extent is wanted alone, a split is whole extents and a warp takes one after the other:
// what it divides is the answer over the extent, and what it keeps joins the split's. So a split
// reads as many rows at once as any, and is merged like any.

#include "gpu/kernels/attend.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "gpu/cuda/attend_tile.cuh"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/lanes.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/rows.cuh"
#include "gpu/cuda/splits.cuh"
#include "gpu/cuda/warp.cuh"

namespace ebbtide::gpu {
namespace {
using namespace attend;  // NOLINT(google-build-using-namespace): the other half of this file.

// Joins `mine` over the block for each row; every thread gets the same.
template <int kRows, class Join>
__device__ __forceinline__ void BlockJoin(float (&mine)[kRows], float* across, Join join) {
  const int t = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    mine[r] = WarpJoin(mine[r], join);
    if (t % kWarpThreads == 0) across[t / kWarpThreads * kRows + r] = mine[r];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    mine[r] = across[r];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) mine[r] = join(mine[r], across[w * kRows + r]);
  }
  __syncthreads();
}

// shared.weight := e^(logit - peak); the logits go out where they are wanted.
template <class Shape, int kRows>
__device__ void Softmax(const View& view, const Lane& lane, const Item& item,
                        Shared<Shape, kRows>& shared, int count) {
  const int t = static_cast<int>(threadIdx.x);
  float peak[kRows];
  float mass[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    peak[r] = -INFINITY;
    mass[r] = 0;
    for (int s = t; s < count; s += kThreads) {
      peak[r] = fmaxf(peak[r], shared.weight[s * kRows + r]);
    }
  }
  BlockJoin<kRows>(peak, shared.across, Larger{});
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const uint32_t row = item.first_row + static_cast<uint32_t>(r);
    float* const logits = lane.logits == nullptr || row >= lane.rows
                              ? nullptr
                              : lane.logits + static_cast<size_t>(row) * lane.slots +
                                    static_cast<size_t>(item.split.number) * kSplitSlots;
    for (int s = t; s < count; s += kThreads) {
      const float logit = shared.weight[s * kRows + r];
      if (logits != nullptr) logits[s] = logit;
      const float weight = logit == -INFINITY ? 0.0F : Exp(logit - peak[r]);
      shared.weight[s * kRows + r] = weight;
      mass[r] += weight;
    }
  }
  BlockJoin<kRows>(mass, shared.across, Plus{});
  if (t != 0) return;
  float2* const peaks =
      view.peaks + static_cast<size_t>(item.first_partial + item.split.number) * kRows;
#pragma unroll
  for (int r = 0; r < kRows; ++r) peaks[r] = make_float2(peak[r], mass[r]);
}

// The split's weighted values, each warp's to shared.output.
template <class Shape, int kRows>
__device__ void Values(const Lane& lane, Shared<Shape, kRows>& shared, int count) {
  constexpr int kWidth = Shape::kWidth;
  constexpr int kGroups = kThreads / kWidth;
  constexpr int kDim = Shape::kHeadDimMax;
  const int t = static_cast<int>(threadIdx.x);
  const int part = t % kWidth;
  float output[kRows][Shape::kElements] = {};
  for (int base = 0; base < count; base += kGroups * kInFlight) {
    typename Shape::Raw raw[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int s = base + u * kGroups + t / kWidth;
      const std::byte* const value = shared.key[s] == nullptr ? nullptr : shared.value[s];
      raw[u] = Shape::Load(value, lane.head_dim, part);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int s = base + u * kGroups + t / kWidth;
      if (s < count) AddValue<Shape, kRows>(raw[u], &shared.weight[s * kRows], output);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int e = 0; e < Shape::kElements; ++e) {
      const float sum = JoinGroups<kWidth>(output[r][e]);
      if (t % kWarpThreads < kWidth) {
        shared.output[(t / kWarpThreads * kRows + r) * kDim + Shape::DimOf(part, e)] = sum;
      }
    }
  }
}

template <class Shape, int kRows>
__global__ void __launch_bounds__(kThreads, kRows == 8 ? 3 : 5) AttendSplits(const View view) {
  __shared__ Shared<Shape, kRows> shared;
  const Item item = view.items[blockIdx.x];
  const Lane lane = view.lanes[item.split.lane];
  const int count = SlotsOf(item.split, lane.slots);
  FindSlots<Shape, kRows>(view, lane, item, static_cast<int>(item.split.number) * kSplitSlots,
                          shared);
  Logits<Shape, kRows>(lane, item, shared, count);
  __syncthreads();
  Softmax<Shape, kRows>(view, lane, item, shared, count);
  Values<Shape, kRows>(lane, shared, count);
  __syncthreads();
  StoreSplit<Shape, kRows>(view, lane, item, shared);
  if (!IsLastBlock(view.tickets + item.tile, item.split.count, &shared.is_last)) return;
  MergeSplits<Shape, kRows>(view, lane, item, shared);
}

// --- Where each extent is wanted alone ---

constexpr int kSplitParts = 8;  // Extents of a split; more would not leave their sums room.
static_assert(kSplitParts <= kMergeSplits);

// A split's extents. What they weigh in it lies in merge_weight, which nothing else needs till
// then.
template <class Shape, int kRows>
struct PartsShared : Shared<Shape, kRows> {
  int first_slot[kSplitParts + 1];       // Of each extent within the split, and the split's end.
  float part_peak[kSplitParts * kRows];  // [extent, row]
  float part_mass[kSplitParts * kRows];  // Relative to it.
};

// Where the split's extents begin and end; returns how many there are. Wait before they are read.
template <class Shape, int kRows>
__device__ int FindParts(const View& view, const Split& split, int split_first,
                         PartsShared<Shape, kRows>& shared) {
  const auto parts = static_cast<int>(split.extents_end - split.first_extent);
  for (int x = static_cast<int>(threadIdx.x); x < parts; x += kThreads) {
    const PlacedExtent placed = view.extents[split.first_extent + static_cast<uint32_t>(x)];
    const int first = static_cast<int>(placed.first_slot) - split_first;
    shared.first_slot[x] = first;
    if (x == parts - 1) shared.first_slot[parts] = first + placed.extent.slots;
  }
  return parts;
}

// Where a part's answers of the tile's rows begin among all, in rows.
__device__ __forceinline__ size_t PlaceOf(const Lane& lane, const Item& item, int x) {
  const uint32_t extent = item.split.first_extent - lane.first_extent + static_cast<uint32_t>(x);
  return static_cast<size_t>(extent) * lane.rows + item.first_row;
}

// shared.weight := e^(logit - peak of its extent), a warp for each extent and row; the logits go
// out where they are wanted.
template <class Shape, int kRows>
__device__ void PartSoftmax(const Lane& lane, const Item& item, int split_first,
                            PartsShared<Shape, kRows>& shared, int parts) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpThreads;
  for (int i = static_cast<int>(threadIdx.x) / kWarpThreads; i < parts * kRows; i += kWarps) {
    const int r = i % kRows;
    const int end = shared.first_slot[i / kRows + 1];
    const uint32_t row = item.first_row + static_cast<uint32_t>(r);
    float* const logits = lane.logits == nullptr || row >= lane.rows
                              ? nullptr
                              : lane.logits + static_cast<size_t>(row) * lane.slots +
                                    static_cast<size_t>(split_first);
    float peak = -INFINITY;
    for (int s = shared.first_slot[i / kRows] + thread; s < end; s += kWarpThreads) {
      peak = fmaxf(peak, shared.weight[s * kRows + r]);
    }
    peak = WarpJoin(peak, Larger{});
    float mass = 0;
    for (int s = shared.first_slot[i / kRows] + thread; s < end; s += kWarpThreads) {
      const float logit = shared.weight[s * kRows + r];
      if (logits != nullptr) logits[s] = logit;
      const float weight = logit == -INFINITY ? 0.0F : Exp(logit - peak);
      shared.weight[s * kRows + r] = weight;
      mass += weight;
    }
    mass = WarpJoin(mass, Plus{});
    if (thread != 0) continue;
    shared.part_peak[i] = peak;
    shared.part_mass[i] = mass;
  }
}

// What each extent weighs in its split; the extents' log-sum-exps go out, the split's peak and mass
// to scratch.
template <class Shape, int kRows>
__device__ void WeighParts(const View& view, const Lane& lane, const Item& item,
                           PartsShared<Shape, kRows>& shared, int parts) {
  const int t = static_cast<int>(threadIdx.x);
  const auto split_peak = [&](int r) {
    float peak = -INFINITY;
    for (int x = 0; x < parts; ++x) peak = fmaxf(peak, shared.part_peak[x * kRows + r]);
    return peak;
  };
  for (int i = t; i < parts * kRows; i += kThreads) {
    const int r = i % kRows;
    const float peak = shared.part_peak[i];
    shared.merge_weight[i] = SplitWeight(peak, split_peak(r));
    if (item.first_row + static_cast<uint32_t>(r) >= lane.rows) continue;
    const auto mass = static_cast<double>(shared.part_mass[i]);
    lane.part_lse[PlaceOf(lane, item, i / kRows) + static_cast<size_t>(r)] =
        peak == -INFINITY ? -INFINITY : static_cast<float>(static_cast<double>(peak) + log(mass));
  }
  __syncthreads();
  if (t >= kRows) return;
  double mass = 0;
  for (int x = 0; x < parts; ++x) {
    const int i = x * kRows + t;
    mass += shared.merge_weight[i] * static_cast<double>(shared.part_mass[i]);
  }
  view.peaks[static_cast<size_t>(item.first_partial + item.split.number) * kRows +
             static_cast<size_t>(t)] = make_float2(split_peak(t), static_cast<float>(mass));
}

// Weighted values of the warp's extents, one after the other: each divided goes out, and weighted
// among the others of the split to shared.output.
template <class Shape, int kRows>
__device__ void PartValues(const Lane& lane, const Item& item, PartsShared<Shape, kRows>& shared,
                           int parts) {
  constexpr int kWidth = Shape::kWidth;
  constexpr int kGroups = kWarpThreads / kWidth;  // Rows of V that a warp reads side by side.
  const int t = static_cast<int>(threadIdx.x);
  const int part = t % kWidth;
  float* const sums = shared.output + t / kWarpThreads * kRows * Shape::kHeadDimMax;
  for (int i = t % kWarpThreads; i < kRows * Shape::kHeadDimMax; i += kWarpThreads) sums[i] = 0;
  __syncwarp();
  for (int x = t / kWarpThreads; x < parts; x += kWarps) {
    const int end = shared.first_slot[x + 1];
    float output[kRows][Shape::kElements] = {};
    for (int base = shared.first_slot[x]; base < end; base += kGroups * kInFlight) {
      typename Shape::Raw raw[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int s = base + u * kGroups + t % kWarpThreads / kWidth;
        const bool is_seen = s < end && shared.key[s] != nullptr;
        raw[u] = Shape::Load(is_seen ? shared.value[s] : nullptr, lane.head_dim, part);
      }
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) {
        const int s = base + u * kGroups + t % kWarpThreads / kWidth;
        if (s < end) AddValue<Shape, kRows>(raw[u], &shared.weight[s * kRows], output);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float mass = shared.part_mass[x * kRows + r];
      const float share = mass == 0 ? 0.0F : 1.0F / mass;
      const auto weight = static_cast<float>(shared.merge_weight[x * kRows + r]);
      const bool is_row = item.first_row + static_cast<uint32_t>(r) < lane.rows;
      float* const out = lane.part_output + (PlaceOf(lane, item, x) + static_cast<size_t>(r)) *
                                                static_cast<size_t>(lane.head_dim);
#pragma unroll
      for (int e = 0; e < Shape::kElements; ++e) {
        const float sum = JoinGroups<kWidth>(output[r][e]);
        const int d = Shape::DimOf(part, e);
        if (t % kWarpThreads >= kWidth || d >= lane.head_dim) continue;
        if (is_row) out[d] = sum * share;
        float& joined = sums[r * Shape::kHeadDimMax + d];
        joined = fmaf(weight, sum, joined);
      }
    }
  }
}

template <class Shape, int kRows>
__global__ void __launch_bounds__(kThreads, kRows == 8 ? 3 : 4) AttendParts(const View view) {
  __shared__ PartsShared<Shape, kRows> shared;
  const Item item = view.items[blockIdx.x];
  const Lane lane = view.lanes[item.split.lane];
  const auto split_first = static_cast<int>(view.extents[item.split.first_extent].first_slot);
  const int parts = FindParts<Shape, kRows>(view, item.split, split_first, shared);
  FindSlots<Shape, kRows>(view, lane, item, split_first, shared);
  Logits<Shape, kRows>(lane, item, shared, shared.first_slot[parts]);
  __syncthreads();
  PartSoftmax<Shape, kRows>(lane, item, split_first, shared, parts);
  __syncthreads();
  WeighParts<Shape, kRows>(view, lane, item, shared, parts);
  PartValues<Shape, kRows>(lane, item, shared, parts);
  __syncthreads();
  StoreSplit<Shape, kRows>(view, lane, item, shared);
  if (!IsLastBlock(view.tickets + item.tile, item.split.count, &shared.is_last)) return;
  MergeSplits<Shape, kRows>(view, lane, item, shared);
}

using Kernel = void (*)(View);

template <class Shape, int kRows>
Kernel KernelFor(bool with_parts) {
  return with_parts ? &AttendParts<Shape, kRows> : &AttendSplits<Shape, kRows>;
}

// For tiles of 1, 4 or 8 rows.
template <class Shape>
Kernel KernelForRows(int rows, bool with_parts) {
  if (rows == 1) return KernelFor<Shape, 1>(with_parts);
  return rows == 4 ? KernelFor<Shape, 4>(with_parts) : KernelFor<Shape, 8>(with_parts);
}

// The lists of one launch: lanes that share dtype and head_dim, and all want parts or none does.
class Lists {
 public:
  Lists(Dtype dtype, int head_dim, bool with_parts, int tile_rows, size_t scratch_bytes_max)
      : dtype_(dtype),
        head_dim_(head_dim),
        with_parts_(with_parts),
        tile_rows_(static_cast<uint32_t>(tile_rows)),
        partials_max_(scratch_bytes_max / (sizeof(float) * static_cast<size_t>(tile_rows) *
                                           static_cast<size_t>(head_dim))) {}

  void Add(const AttendArgs& args) {
    const size_t row_bytes = RowBytes(dtype_, head_dim_);
    const auto lane = static_cast<uint32_t>(lanes_.size());
    const auto first_extent = static_cast<uint32_t>(extents_.size());
    std::vector<Split> splits;
    uint32_t slots = 0;
    if (with_parts_) {
      slots = AddWholeSplits(lane, args.extents, row_bytes, kSplitParts, extents_, splits);
    } else {
      const LaneSplits placed = PlaceExtents(args.extents, row_bytes, extents_);
      slots = placed.slots;
      AddSplits(lane, placed, splits);
    }
    const auto rows = static_cast<uint32_t>(args.lse.size());
    lanes_.push_back({.query = args.query.data(),
                      .query_index = args.query_index.data(),
                      .output = args.output.data(),
                      .lse = args.lse.data(),
                      .logits = args.logits.empty() ? nullptr : args.logits.data(),
                      .rows = rows,
                      .queries = static_cast<uint32_t>(args.queries),
                      .slots = slots,
                      .head_dim = head_dim_,
                      .scale = args.scale,
                      .part_output = with_parts_ ? args.part_output.data() : nullptr,
                      .part_lse = with_parts_ ? args.part_lse.data() : nullptr,
                      .first_extent = first_extent});
    for (uint32_t row = 0; row < rows; row += tile_rows_) {
      if (partials_ > 0 && partials_ + splits.size() > partials_max_) CloseLaunch();
      for (const Split& split : splits) items_.push_back({split, row, tiles_, partials_});
      ++tiles_;
      partials_ += static_cast<uint32_t>(splits.size());
    }
  }

  // What follows goes into another launch, which uses the same scratch.
  void CloseLaunch() {
    most_partials_ = std::max(most_partials_, partials_);
    partials_ = 0;
    launch_ends_.push_back(items_.size());
  }

  absl::Status Run(CudaStream& stream) {
    if (items_.empty()) return absl::OkStatus();
    CloseLaunch();
    View view = {};
    EBBTIDE_ASSIGN_OR_RETURN(view.lanes, stream.Upload(std::span<const Lane>(lanes_)));
    EBBTIDE_ASSIGN_OR_RETURN(view.extents, stream.Upload(std::span<const PlacedExtent>(extents_)));
    EBBTIDE_ASSIGN_OR_RETURN(view.items, stream.Upload(std::span<const Item>(items_)));
    EBBTIDE_ASSIGN_OR_RETURN(view.tickets, stream.UploadZeros<unsigned>(tiles_));
    const size_t rows = static_cast<size_t>(most_partials_) * tile_rows_;
    EBBTIDE_ASSIGN_OR_RETURN(view.outputs,
                             stream.Scratch<float>(rows * static_cast<size_t>(head_dim_)));
    EBBTIDE_ASSIGN_OR_RETURN(view.peaks, stream.Scratch<float2>(rows));
    const Kernel kernel = WithRowShape(dtype_, head_dim_, [&](auto shape) {
      return KernelForRows<decltype(shape)>(static_cast<int>(tile_rows_), with_parts_);
    });
    size_t begin = 0;
    for (const size_t end : launch_ends_) {  // One, unless scratch is short.
      const LaunchShape shape = {
          .operation = "attend", .grid = GridOf(end - begin, 1), .threads = kThreads};
      EBBTIDE_RETURN_IF_ERROR(Launch(stream, shape, kernel, view));
      view.items += end - begin;
      begin = end;
    }
    return absl::OkStatus();
  }

 private:
  Dtype dtype_;
  int head_dim_;
  bool with_parts_;
  uint32_t tile_rows_;
  std::vector<Lane> lanes_;
  std::vector<PlacedExtent> extents_;
  std::vector<Item> items_;
  uint32_t tiles_ = 0;
  size_t partials_max_;
  uint32_t partials_ = 0;  // Of the launch that is filled.
  uint32_t most_partials_ = 0;
  std::vector<size_t> launch_ends_;  // In items.
};

absl::Status RunLists(std::span<const AttendArgs* const> lanes, bool with_parts,
                      CudaStream& stream) {
  if (lanes.empty()) return absl::OkStatus();
  size_t rows = 0;
  for (const AttendArgs* args : lanes) rows = std::max(rows, args->lse.size());
  const int tile_rows = rows <= 1 ? 1 : rows <= 4 ? 4 : 8;
  Lists lists(lanes[0]->dtype, lanes[0]->head_dim, with_parts, tile_rows,
              stream.scratch_bytes_max());
  for (const AttendArgs* args : lanes) lists.Add(*args);
  return lists.Run(stream);
}

}  // namespace

absl::Status AttendCuda(std::span<const AttendArgs> lanes, CudaStream& stream) {
  for (const AttendArgs& args : lanes) CheckAttend(args);
  return ForEachShape(lanes, [&](std::span<const AttendArgs* const> group) {
    std::vector<const AttendArgs*> plain, parted;
    for (const AttendArgs* args : group) (args->part_lse.empty() ? plain : parted).push_back(args);
    EBBTIDE_RETURN_IF_ERROR(RunLists(plain, /*with_parts=*/false, stream));
    return RunLists(parted, /*with_parts=*/true, stream);
  });
}

}  // namespace ebbtide::gpu
