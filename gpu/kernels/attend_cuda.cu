// SPDX-License-Identifier: Apache-2.0
//
// Attention, split over the slots of a lane. One block takes 256 slots for a tile of up to 8 rows:
// keys, softmax within the split, values; the block of a tile that finishes last merges its splits
// in their order, in f64. Which block that is, how many there are and what else runs change no bit.
//
// A row of 16-byte pieces is shared by 8 to 32 threads, four rows in flight for each, so that one
// pass over K and V keeps the memory busy; dot products of all rows in flight are reduced together.
// Expected: bound by memory up to 4 rows, by instructions at 8 (docs/benchmarks.md).

#include "gpu/kernels/attend.h"

#include <algorithm>
#include <cstdint>
#include <limits>
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
constexpr int kInFlight = 4;      // Rows of K or V that a thread has asked for at once.
constexpr int kMergeSplits = 32;  // Splits whose weights are computed together.

// One lane, and its extents laid end to end.
struct Lane {
  const float* query;
  const int32_t* query_index;
  float* output;
  float* lse;
  float* logits;  // Null: not wanted.
  uint32_t rows, queries, slots;
  int32_t head_dim;
  float scale;
};
// What a block does: a tile of rows over one split.
struct Item {
  Split split;
  uint32_t first_row;
  uint32_t tile;           // Its ticket.
  uint32_t first_partial;  // Of the tile's splits.
};

struct View {
  const Lane* lanes;
  const PlacedExtent* extents;
  const Item* items;
  unsigned* tickets;  // [tile] how many splits are done
  float* outputs;     // [partial, rows, head_dim] not yet divided
  float2* peaks;      // [partial, rows] largest logit, and the mass relative to it
};

// A block's shared memory; kRows is how many rows a tile holds.
template <class Shape, int kRows>
struct Shared {
  const std::byte* key[kSplitSlots];  // Null where no row of the tile sees the slot.
  const std::byte* value[kSplitSlots];
  int32_t index[kSplitSlots];
  int32_t seen_up_to[kRows];
  float weight[kSplitSlots * kRows];  // [slot, row] logits, then weights
  float across[kWarps * kRows];
  float output[kWarps * kRows * Shape::kHeadDimMax];
  double merge_weight[kMergeSplits * kRows];
  double merge_mass[kRows];
  float merge_peak[kRows];
  bool is_last;
};

// Looks up where the split's slots lie that some row of the tile sees.
template <class Shape, int kRows>
__device__ void FindSlots(const View& view, const Lane& lane, const Item& item,
                          Shared<Shape, kRows>& shared) {
  const int t = static_cast<int>(threadIdx.x);
  if (t < kRows) {
    const uint32_t row = item.first_row + static_cast<uint32_t>(t);
    shared.seen_up_to[t] = row < lane.rows ? lane.query_index[row % lane.queries] : kNoToken;
  }
  for (int s = t; s < kSplitSlots; s += kThreads) shared.key[s] = nullptr;
  __syncthreads();
  int32_t seen_up_to = shared.seen_up_to[0];
#pragma unroll
  for (int r = 1; r < kRows; ++r) seen_up_to = max(seen_up_to, shared.seen_up_to[r]);
  const size_t row_bytes = static_cast<size_t>(lane.head_dim) * sizeof(typename Shape::Type);
  ForEachSlot(view.extents, item.split, [&](int s, const Extent& extent, int i) {
    const int32_t index = extent.index[i];
    if (index == kNoToken || index > seen_up_to) return;
    shared.key[s] = extent.key + static_cast<size_t>(i) * row_bytes;
    shared.value[s] = extent.value + static_cast<size_t>(i) * row_bytes;
    shared.index[s] = index;
  });
  __syncthreads();
}

// shared.weight := scale * query . key, or -inf where a row does not see a slot.
template <class Shape, int kRows>
__device__ void Logits(const Lane& lane, const Item& item, Shared<Shape, kRows>& shared,
                       int count) {
  constexpr int kWidth = Shape::kWidth;
  constexpr int kGroups = kThreads / kWidth;  // Rows of K that the block reads side by side.
  constexpr int kSums = kInFlight * kRows;
  constexpr int kOwned =
      kSums >= kWidth ? kSums / kWidth : 1;  // Sums that one thread ends up with,
  constexpr int kOwners = kSums >= kWidth ? 1 : kWidth / kSums;  // or threads that share one.
  const int part = static_cast<int>(threadIdx.x) % kWidth;
  const int group = static_cast<int>(threadIdx.x) / kWidth;
  float query[kRows][Shape::kElements];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const size_t row = item.first_row + static_cast<size_t>(r);
    Shape::LoadFloats(lane.query + row * static_cast<size_t>(lane.head_dim),
                      row < lane.rows ? lane.head_dim : 0, part, query[r]);
  }
  for (int base = 0; base < count; base += kGroups * kInFlight) {
    typename Shape::Raw raw[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      raw[u] = Shape::Load(shared.key[base + u * kGroups + group], lane.head_dim, part);
    }
    float sum[kSums];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      float key[Shape::kElements];
      Shape::Widen(raw[u], key);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float product = 0;
#pragma unroll
        for (int e = 0; e < Shape::kElements; ++e) product = fmaf(query[r][e], key[e], product);
        sum[u * kRows + r] = product;
      }
    }
    TransposeSum<kSums, kWidth>(sum, part);
    if (part % kOwners != 0) continue;
#pragma unroll
    for (int i = 0; i < kOwned; ++i) {
      const int owned = part / kOwners * kOwned + i;
      const int s = base + owned / kRows * kGroups + group;
      const int r = owned % kRows;
      const bool sees = shared.key[s] != nullptr && shared.index[s] <= shared.seen_up_to[r];
      shared.weight[s * kRows + r] = sees ? lane.scale * sum[i] : -INFINITY;
    }
  }
}

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

// The split's weighted values, to scratch.
template <class Shape, int kRows>
__device__ void Values(const View& view, const Lane& lane, const Item& item,
                       Shared<Shape, kRows>& shared, int count) {
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
      if (s >= count) continue;
      float value[Shape::kElements];
      Shape::Widen(raw[u], value);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float weight = shared.weight[s * kRows + r];
        if (weight == 0) continue;  // A slot this row does not see may hold anything.
#pragma unroll
        for (int e = 0; e < Shape::kElements; ++e) {
          output[r][e] = fmaf(weight, value[e], output[r][e]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int e = 0; e < Shape::kElements; ++e) {
#pragma unroll
      for (int distance = kWidth; distance < kWarpThreads; distance *= 2) {
        output[r][e] += __shfl_xor_sync(kWholeWarp, output[r][e], distance);
      }
      if (t % kWarpThreads < kWidth) {
        shared.output[(t / kWarpThreads * kRows + r) * kDim + Shape::DimOf(part, e)] = output[r][e];
      }
    }
  }
  __syncthreads();
  float* const partial =
      view.outputs + static_cast<size_t>(item.first_partial + item.split.number) *
                         static_cast<size_t>(kRows * lane.head_dim);
  for (int i = t; i < kRows * lane.head_dim; i += kThreads) {
    const int r = i / lane.head_dim;
    const int d = i % lane.head_dim;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared.output[(w * kRows + r) * kDim + d];
    partial[i] = sum;
  }
}

// What a split weighs beside the largest logit of all.
__device__ __forceinline__ double SplitWeight(float peak, float largest) {
  return peak == -INFINITY ? 0.0 : exp(static_cast<double>(peak) - static_cast<double>(largest));
}

// Largest logit and mass of each row over all splits, a warp for each row; and the row's lse.
template <class Shape, int kRows>
__device__ void MergeMasses(const Lane& lane, const Item& item, const float2* peaks,
                            Shared<Shape, kRows>& shared) {
  const int t = static_cast<int>(threadIdx.x);
  const auto splits = static_cast<int>(item.split.count);
  for (int r = t / kWarpThreads; r < kRows; r += kWarps) {
    float peak = -INFINITY;
    for (int x = t % kWarpThreads; x < splits; x += kWarpThreads) {
      peak = fmaxf(peak, __ldcg(&peaks[x * kRows + r]).x);
    }
    peak = WarpJoin(peak, Larger{});
    double mass = 0;
    for (int x = t % kWarpThreads; x < splits; x += kWarpThreads) {
      const float2 split = __ldcg(&peaks[x * kRows + r]);
      mass += SplitWeight(split.x, peak) * static_cast<double>(split.y);
    }
    mass = WarpJoin(mass, Plus{});
    if (t % kWarpThreads != 0) continue;
    shared.merge_peak[r] = peak;
    shared.merge_mass[r] = mass;
    const uint32_t row = item.first_row + static_cast<uint32_t>(r);
    if (row < lane.rows) {
      lane.lse[row] = mass == 0 ? -INFINITY : static_cast<float>(peak + log(mass));
    }
  }
  __syncthreads();
}

// Merges a tile's splits in their order, whichever block comes last: the same bits every time.
template <class Shape, int kRows>
__device__ void MergeSplits(const View& view, const Lane& lane, const Item& item,
                            Shared<Shape, kRows>& shared) {
  constexpr int kMine = (kRows * Shape::kHeadDimMax + kThreads - 1) / kThreads;
  const int t = static_cast<int>(threadIdx.x);
  const auto splits = static_cast<int>(item.split.count);
  const int elements = kRows * lane.head_dim;
  const float2* const peaks = view.peaks + static_cast<size_t>(item.first_partial) * kRows;
  const float* const outputs =
      view.outputs + static_cast<size_t>(item.first_partial) * static_cast<size_t>(elements);
  MergeMasses<Shape, kRows>(lane, item, peaks, shared);
  double sum[kMine] = {};
  for (int base = 0; base < splits; base += kMergeSplits) {
    const int batch = min(splits - base, kMergeSplits);
    for (int i = t; i < batch * kRows; i += kThreads) {
      shared.merge_weight[i] =
          SplitWeight(__ldcg(&peaks[base * kRows + i]).x, shared.merge_peak[i % kRows]);
    }
    __syncthreads();
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
      const int i = t + mine * kThreads;
      if (i >= elements) continue;
      const int r = i / lane.head_dim;
      for (int x = 0; x < batch; ++x) {
        const size_t at = static_cast<size_t>(base + x) * static_cast<size_t>(elements);
        sum[mine] = fma(shared.merge_weight[x * kRows + r],
                        static_cast<double>(__ldcg(outputs + at + i)), sum[mine]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int mine = 0; mine < kMine; ++mine) {
    const int i = t + mine * kThreads;
    if (i >= elements) continue;
    const int r = i / lane.head_dim;
    if (item.first_row + static_cast<uint32_t>(r) >= lane.rows) continue;
    const double mass = shared.merge_mass[r];
    lane.output[static_cast<size_t>(item.first_row) * static_cast<size_t>(lane.head_dim) +
                static_cast<size_t>(i)] = mass == 0 ? 0.0F : static_cast<float>(sum[mine] / mass);
  }
}

template <class Shape, int kRows>
__global__ void __launch_bounds__(kThreads, kRows == 8 ? 3 : 5) AttendSplits(const View view) {
  __shared__ Shared<Shape, kRows> shared;
  const Item item = view.items[blockIdx.x];
  const Lane lane = view.lanes[item.split.lane];
  const int count = SlotsOf(item.split, lane.slots);
  FindSlots<Shape, kRows>(view, lane, item, shared);
  Logits<Shape, kRows>(lane, item, shared, count);
  __syncthreads();
  Softmax<Shape, kRows>(view, lane, item, shared, count);
  Values<Shape, kRows>(view, lane, item, shared, count);
  if (!IsLastBlock(view.tickets + item.tile, item.split.count, &shared.is_last)) return;
  MergeSplits<Shape, kRows>(view, lane, item, shared);
}

using Kernel = void (*)(View);

// For tiles of 1, 4 or 8 rows.
template <class Shape>
Kernel ForRows(int rows) {
  if (rows == 1) return &AttendSplits<Shape, 1>;
  return rows == 4 ? &AttendSplits<Shape, 4> : &AttendSplits<Shape, 8>;
}

// The lists of one launch: lanes that share dtype and head_dim.
class Lists {
 public:
  Lists(Dtype dtype, int head_dim, int tile_rows, size_t scratch_bytes_max)
      : dtype_(dtype),
        head_dim_(head_dim),
        tile_rows_(static_cast<uint32_t>(tile_rows)),
        partials_max_(scratch_bytes_max / (sizeof(float) * static_cast<size_t>(tile_rows) *
                                           static_cast<size_t>(head_dim))) {}

  void Add(const AttendArgs& args) {
    const size_t row_bytes = RowBytes(dtype_, head_dim_);
    const auto lane = static_cast<uint32_t>(lanes_.size());
    const LaneSplits placed = PlaceExtents(args.extents, row_bytes, extents_);
    const auto rows = static_cast<uint32_t>(args.lse.size());
    lanes_.push_back({.query = args.query.data(),
                      .query_index = args.query_index.data(),
                      .output = args.output.data(),
                      .lse = args.lse.data(),
                      .logits = args.logits.empty() ? nullptr : args.logits.data(),
                      .rows = rows,
                      .queries = static_cast<uint32_t>(args.queries),
                      .slots = placed.slots,
                      .head_dim = head_dim_,
                      .scale = args.scale});
    std::vector<Split> splits;
    AddSplits(lane, placed, splits);
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
      return ForRows<decltype(shape)>(static_cast<int>(tile_rows_));
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

}  // namespace

absl::Status AttendCuda(std::span<const AttendArgs> lanes, CudaStream& stream) {
  for (const AttendArgs& args : lanes) CheckAttend(args);
  return ForEachShape(lanes, [&](std::span<const AttendArgs* const> group) {
    size_t rows = 0;
    for (const AttendArgs* args : group) rows = std::max(rows, args->lse.size());
    Lists lists(group[0]->dtype, group[0]->head_dim,
                rows <= 1   ? 1
                : rows <= 4 ? 4
                            : 8,
                stream.scratch_bytes_max());
    for (const AttendArgs* args : group) lists.Add(*args);
    return lists.Run(stream);
  });
}

}  // namespace ebbtide::gpu
