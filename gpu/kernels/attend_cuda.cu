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
#include "gpu/cuda/launch.h"
#include "gpu/cuda/rows.cuh"
#include "gpu/cuda/warp.cuh"

namespace ebbtide::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kSplitSlots = 256;  // Part of what makes answers repeat: changing it changes bits.
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
  uint32_t extents_end;
  int32_t head_dim;
  float scale;
};
struct PlacedExtent {
  Extent extent;
  uint32_t first_slot;
};

// What a block does: a tile of rows over one split.
struct Item {
  uint32_t lane;
  uint32_t first_row;
  uint32_t split, splits;  // Which of how many.
  uint32_t first_extent;   // The one that holds the split's first slot.
  uint32_t tile;           // Its ticket.
  uint32_t first_partial;  // Of the tile's splits.
};

struct View {
  const Lane* lanes;
  const PlacedExtent* extents;
  const Item* items;
  uint32_t* tickets;  // [tile] how many splits are done
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

// Looks up where the split's slots lie, a warp for each extent.
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
  const auto split_first = static_cast<int>(item.split) * kSplitSlots;
  const size_t row_bytes = static_cast<size_t>(lane.head_dim) * sizeof(typename Shape::Type);
  for (uint32_t e = item.first_extent + static_cast<uint32_t>(t / kWarpThreads);
       e < lane.extents_end; e += kWarps) {
    const PlacedExtent placed = view.extents[e];
    const int first = static_cast<int>(placed.first_slot) - split_first;
    if (first >= kSplitSlots) break;
    for (int i = t % kWarpThreads; i < placed.extent.slots; i += kWarpThreads) {
      if (first + i < 0 || first + i >= kSplitSlots) continue;
      const int32_t index = placed.extent.index[i];
      if (index == kNoToken || index > seen_up_to) continue;
      shared.key[first + i] = placed.extent.key + static_cast<size_t>(i) * row_bytes;
      shared.value[first + i] = placed.extent.value + static_cast<size_t>(i) * row_bytes;
      shared.index[first + i] = index;
    }
  }
  __syncthreads();
}

// The thread's part of each query of the tile.
template <class Shape, int kRows>
__device__ __forceinline__ void LoadQueries(const Lane& lane, const Item& item, int part,
                                            float (&query)[kRows][Shape::kElements]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const uint32_t row = item.first_row + static_cast<uint32_t>(r);
#pragma unroll
    for (int e = 0; e < Shape::kElements; ++e) {
      const int d = Shape::First(part, e / Shape::kChunkElements) + e % Shape::kChunkElements;
      const bool is_there = row < lane.rows && d < lane.head_dim;
      query[r][e] = is_there
                        ? lane.query[static_cast<size_t>(row) * static_cast<size_t>(lane.head_dim) +
                                     static_cast<size_t>(d)]
                        : 0.0F;
    }
  }
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
  LoadQueries<Shape, kRows>(lane, item, part, query);
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
                                    static_cast<size_t>(item.split) * kSplitSlots;
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
  float2* const peaks = view.peaks + static_cast<size_t>(item.first_partial + item.split) * kRows;
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
      const int d = Shape::First(part, e / Shape::kChunkElements) + e % Shape::kChunkElements;
      if (t % kWarpThreads < kWidth) {
        shared.output[(t / kWarpThreads * kRows + r) * kDim + d] = output[r][e];
      }
    }
  }
  __syncthreads();
  float* const partial = view.outputs + static_cast<size_t>(item.first_partial + item.split) *
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
  const auto splits = static_cast<int>(item.splits);
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
  const auto splits = static_cast<int>(item.splits);
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
  const Lane lane = view.lanes[item.lane];
  const int left = static_cast<int>(lane.slots) - static_cast<int>(item.split) * kSplitSlots;
  const int count = min(left, kSplitSlots);
  FindSlots<Shape, kRows>(view, lane, item, shared);
  Logits<Shape, kRows>(lane, item, shared, count);
  __syncthreads();
  Softmax<Shape, kRows>(view, lane, item, shared, count);
  Values<Shape, kRows>(view, lane, item, shared, count);
  __threadfence();  // The partial is there before the ticket says so.
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.is_last = atomicAdd(view.tickets + item.tile, 1U) + 1 == item.splits;
  }
  __syncthreads();
  if (!shared.is_last) return;
  __threadfence();
  MergeSplits<Shape, kRows>(view, lane, item, shared);
}

using Kernel = void (*)(View);

// For tiles of 1, 4 or 8 rows.
template <class Shape>
Kernel ForRows(int rows) {
  if (rows == 1) return &AttendSplits<Shape, 1>;
  return rows == 4 ? &AttendSplits<Shape, 4> : &AttendSplits<Shape, 8>;
}

template <class T>
Kernel ForHeadDim(int head_dim, int rows) {
  constexpr int kChunkElements = 16 / static_cast<int>(sizeof(T));
  constexpr int kChunksMax = kHeadDimMax / kChunkElements / kWarpThreads;
  if (head_dim % kChunkElements != 0) {
    return ForRows<RowShape<T, kWarpThreads, kChunksMax, true>>(rows);
  }
  const int chunks = head_dim / kChunkElements;
  if (chunks <= 8) return ForRows<RowShape<T, 8, 1, false>>(rows);
  if (chunks <= 16) return ForRows<RowShape<T, 16, 1, false>>(rows);
  if (chunks <= 32) return ForRows<RowShape<T, 32, 1, false>>(rows);
  return ForRows<RowShape<T, 32, kChunksMax, false>>(rows);
}

bool IsAligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

// The lists of one launch: lanes that share dtype and head_dim.
class Lists {
 public:
  Lists(Dtype dtype, int head_dim, int tile_rows)
      : dtype_(dtype), head_dim_(head_dim), tile_rows_(static_cast<uint32_t>(tile_rows)) {}

  void Add(const AttendArgs& args) {
    const size_t row_bytes = static_cast<size_t>(head_dim_) * DtypeBytes(dtype_);
    const auto lane = static_cast<uint32_t>(lanes_.size());
    std::vector<uint32_t> first_extents;  // Of each split.
    const auto first_extent = static_cast<uint32_t>(extents_.size());
    uint32_t slots = 0;
    for (const Extent& extent : args.extents) {
      if (extent.slots == 0) continue;
      EBBTIDE_CHECK(row_bytes % 16 != 0 || (IsAligned(extent.key) && IsAligned(extent.value)),
                    "attend: keys and values of an extent are 16-byte aligned");
      const auto at = static_cast<uint32_t>(extents_.size());
      extents_.push_back({extent, slots});
      slots += static_cast<uint32_t>(extent.slots);
      while (first_extents.size() * kSplitSlots < slots) first_extents.push_back(at);
    }
    if (slots == 0)
      first_extents.push_back(first_extent);  // Somebody must say that nothing is seen.
    const auto rows = static_cast<uint32_t>(args.lse.size());
    lanes_.push_back({.query = args.query.data(),
                      .query_index = args.query_index.data(),
                      .output = args.output.data(),
                      .lse = args.lse.data(),
                      .logits = args.logits.empty() ? nullptr : args.logits.data(),
                      .rows = rows,
                      .queries = static_cast<uint32_t>(args.queries),
                      .slots = slots,
                      .extents_end = static_cast<uint32_t>(extents_.size()),
                      .head_dim = head_dim_,
                      .scale = args.scale});
    for (uint32_t row = 0; row < rows; row += tile_rows_) AddTile(lane, row, first_extents);
  }

  absl::Status Run(CudaStream& stream) {
    if (items_.empty()) return absl::OkStatus();
    const std::vector<uint32_t> zeros(tiles_, 0);
    View view = {};
    EBBTIDE_ASSIGN_OR_RETURN(view.lanes, stream.Upload(std::span<const Lane>(lanes_)));
    EBBTIDE_ASSIGN_OR_RETURN(view.extents, stream.Upload(std::span<const PlacedExtent>(extents_)));
    EBBTIDE_ASSIGN_OR_RETURN(view.items, stream.Upload(std::span<const Item>(items_)));
    EBBTIDE_ASSIGN_OR_RETURN(const uint32_t* tickets,
                             stream.Upload(std::span<const uint32_t>(zeros)));
    view.tickets = const_cast<uint32_t*>(tickets);  // Ours alone: the launch's own copy.
    const size_t rows = static_cast<size_t>(partials_) * tile_rows_;
    EBBTIDE_ASSIGN_OR_RETURN(view.outputs,
                             stream.Scratch<float>(rows * static_cast<size_t>(head_dim_)));
    EBBTIDE_ASSIGN_OR_RETURN(view.peaks, stream.Scratch<float2>(rows));
    const auto tile_rows = static_cast<int>(tile_rows_);
    const Kernel kernel = dtype_ == Dtype::kF16 ? ForHeadDim<__half>(head_dim_, tile_rows)
                                                : ForHeadDim<float>(head_dim_, tile_rows);
    return Launch(stream,
                  {.operation = "attend", .grid = GridOf(items_.size(), 1), .threads = kThreads},
                  kernel, view);
  }

 private:
  void AddTile(uint32_t lane, uint32_t row, const std::vector<uint32_t>& first_extents) {
    const auto splits = static_cast<uint32_t>(first_extents.size());
    for (uint32_t split = 0; split < splits; ++split) {
      items_.push_back({.lane = lane,
                        .first_row = row,
                        .split = split,
                        .splits = splits,
                        .first_extent = first_extents[split],
                        .tile = tiles_,
                        .first_partial = partials_});
    }
    ++tiles_;
    partials_ += splits;
  }

  Dtype dtype_;
  int head_dim_;
  uint32_t tile_rows_;
  std::vector<Lane> lanes_;
  std::vector<PlacedExtent> extents_;
  std::vector<Item> items_;
  uint32_t tiles_ = 0;
  uint32_t partials_ = 0;
};

}  // namespace

absl::Status AttendCuda(std::span<const AttendArgs> lanes, CudaStream& stream) {
  std::vector<const AttendArgs*> left;
  for (const AttendArgs& args : lanes) {
    CheckAttend(args);
    left.push_back(&args);
  }
  while (!left.empty()) {  // Once, unless lanes of several models meet.
    const Dtype dtype = left[0]->dtype;
    const int head_dim = left[0]->head_dim;
    const auto others = std::stable_partition(
        left.begin(), left.end(),
        [&](const AttendArgs* args) { return args->dtype == dtype && args->head_dim == head_dim; });
    size_t rows = 0;
    for (auto args = left.begin(); args != others; ++args) {
      rows = std::max(rows, (*args)->lse.size());
    }
    Lists lists(dtype, head_dim, rows <= 1 ? 1 : rows <= 4 ? 4 : 8);
    for (auto args = left.begin(); args != others; ++args) lists.Add(**args);
    EBBTIDE_RETURN_IF_ERROR(lists.Run(stream));
    left.erase(left.begin(), others);
  }
  return absl::OkStatus();
}

}  // namespace ebbtide::gpu
