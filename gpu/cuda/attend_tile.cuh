// SPDX-License-Identifier: Apache-2.0
//
// What attend's two kernels share (gpu/kernels/attend_cuda.cu): a block's tile of rows over its
// split of a lane, where its slots lie, its logits, and how a tile's splits are merged.

#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/cuda/rows.cuh"
#include "gpu/cuda/splits.cuh"
#include "gpu/cuda/warp.cuh"

namespace ebbtide::gpu::attend {

inline constexpr int kThreads = 128;
inline constexpr int kWarps = kThreads / kWarpThreads;
inline constexpr int kInFlight = 4;      // Rows of K or V that a thread has asked for at once.
inline constexpr int kMergeSplits = 32;  // Splits whose weights are computed together.

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
  float* part_output;  // Null: not wanted, as the next.
  float* part_lse;
  uint32_t first_extent;  // In the list, where parts are wanted.
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
__device__ void FindSlots(const View& view, const Lane& lane, const Item& item, int split_first,
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
  ForEachSlot(view.extents, item.split, split_first, [&](int s, const Extent& extent, int i) {
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

// A row of V, weighted for each row of the tile.
template <class Shape, int kRows>
__device__ __forceinline__ void AddValue(const typename Shape::Raw& raw, const float* weights,
                                         float (&output)[kRows][Shape::kElements]) {
  float value[Shape::kElements];
  Shape::Widen(raw, value);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float weight = weights[r];
    if (weight == 0) continue;  // A slot this row does not see may hold anything.
#pragma unroll
    for (int e = 0; e < Shape::kElements; ++e) output[r][e] = fmaf(weight, value[e], output[r][e]);
  }
}

// The sum over the threads of a warp that hold the same channels.
template <int kWidth>
__device__ __forceinline__ float JoinGroups(float sum) {
#pragma unroll
  for (int distance = kWidth; distance < kWarpThreads; distance *= 2) {
    sum += __shfl_xor_sync(kWholeWarp, sum, distance);
  }
  return sum;
}

// What the block's warps have in shared.output, added up, to scratch.
template <class Shape, int kRows>
__device__ void StoreSplit(const View& view, const Lane& lane, const Item& item,
                           const Shared<Shape, kRows>& shared) {
  constexpr int kDim = Shape::kHeadDimMax;
  float* const partial =
      view.outputs + static_cast<size_t>(item.first_partial + item.split.number) *
                         static_cast<size_t>(kRows * lane.head_dim);
  for (int i = static_cast<int>(threadIdx.x); i < kRows * lane.head_dim; i += kThreads) {
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

}  // namespace ebbtide::gpu::attend
