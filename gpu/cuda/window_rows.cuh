// SPDX-License-Identifier: Apache-2.0
//
// The rows of observation windows (gpu/kernels/window_cuda.cu): lanes as the kernel sees them, and
// their queries, prepared in scratch as tiles of products take them: padded, and for tensor cores
// in parts of the keys' own type.

#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/cuda/block.cuh"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/port.h"
#include "gpu/cuda/warp.cuh"
#include "gpu/extent.h"

namespace ebbtide::gpu::window {

inline constexpr int kThreads = 128;
inline constexpr int kWarps = kThreads / kWarpThreads;
inline constexpr int kTileRows = 16;  // Of queries, for a warp.
inline constexpr int kStepChannels =
    16;  // Of one m16n8k16; prepared queries are padded to a multiple.

// How keys of type T lie in shared memory and prepared queries in scratch: in words of kInWord
// elements, moved kInPiece elements at a time; queries in kParts parts, which add up to them.
template <class T>
struct Layout;
struct PairLayout {
  using Word = unsigned;
  using Piece = uint4;
  static constexpr int kInWord = 2;
  static constexpr int kInPiece = 8;

  // Elements 2 * w and the next of a row at any address; zeros past its end.
  static __device__ __forceinline__ Word WordAt(const std::byte* row, int w, int head_dim) {
    const int d = 2 * w;
    const unsigned first = d < head_dim ? ReadAt<uint16_t>(row + size_t{2} * d) : 0U;
    const unsigned second = d + 1 < head_dim ? ReadAt<uint16_t>(row + size_t{2} * d + 2) : 0U;
    return first | second << 16;
  }
};
template <>
struct Layout<__half> : PairLayout {
  static constexpr int kParts = 2;  // Of 11 bits each.

  // The part of `rest` that a half holds, taken off it.
  static __device__ __forceinline__ unsigned TakePart(float& rest) {
    const __half part = __float2half_rn(rest);
    rest -= __half2float(part);
    return __half_as_ushort(part);
  }
};
template <>
struct Layout<__nv_bfloat16> : PairLayout {
  static constexpr int kParts = 3;  // Of 8 bits each.

  static __device__ __forceinline__ unsigned TakePart(float& rest) {
    const __nv_bfloat16 part = __float2bfloat16_rn(rest);
    rest -= __bfloat162float(part);
    return __bfloat16_as_ushort(part);
  }
};
template <>
struct Layout<float> {
  using Word = float;
  using Piece = float4;
  static constexpr int kInWord = 1;
  static constexpr int kInPiece = 4;
  static constexpr int kParts = 1;

  static __device__ __forceinline__ Word WordAt(const std::byte* row, int w, int head_dim) {
    return w < head_dim ? ReadAt<float>(row + size_t{4} * w) : 0.0F;
  }
};

// One lane, and its room in scratch.
template <class T>
struct Lane {
  const float* query;
  const int32_t* query_index;
  float* mass;
  // [padded_rows, padded_dim] of queries
  typename Layout<T>::Word* part[Layout<T>::kParts];
  int32_t* parts;             // [padded_rows] how many of them are not 0
  float* row_scale;           // [padded_rows]
  uint32_t* seen_below;       // [padded_rows] a row sees the indices below; 0: none
  uint32_t* most_seen_below;  // The largest of them.
  float2* peaks;              // [padded_rows, tiles] largest logit, and the sum relative to it
  float* lse;                 // [padded_rows] inf where nothing is seen
  uint32_t rows, padded_rows, queries, slots, tiles;
  int32_t head_dim, padded_dim, group;
  float scale;
};

// A token's index is below this where a query sees it; kNoToken never is.
__device__ __forceinline__ uint32_t SeenBelow(int32_t query_index) {
  return query_index < 0 ? 0U : static_cast<uint32_t>(query_index) + 1U;
}

// 2^shift brings a row's largest element up to 2^13 and more, so that its last part is seldom below
// the normal range, and no sum of products overflows.
__device__ __forceinline__ int ShiftOf(float largest) {
  const bool is_number = largest > 0 && largest < INFINITY;
  return is_number ? 13 - ilogbf(largest) : 0;
}

template <class T>
__device__ __forceinline__ void PrepareRow(const Lane<T>& lane, uint32_t row) {
  using In = Layout<T>;
  const int t = static_cast<int>(threadIdx.x % kWarpThreads);
  const float* const query = lane.query + size_t{row} * static_cast<size_t>(lane.head_dim);
  const int head_dim = row < lane.rows ? lane.head_dim : 0;
  float largest = 0;
  for (int d = t; d < head_dim; d += kWarpThreads) largest = fmaxf(largest, fabsf(query[d]));
  const int shift = ShiftOf(WarpJoin(largest, Larger{}));
  unsigned any[In::kParts] = {};
  const int words = lane.padded_dim / 2;
  for (int w = t; w < words; w += kWarpThreads) {
    unsigned word[In::kParts] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int d = 2 * w + i;
      float rest = d < head_dim ? ldexpf(query[d], shift) : 0.0F;
#pragma unroll
      for (unsigned& part : word) part |= In::TakePart(rest) << 16 * i;
    }
    const size_t at = size_t{row} * static_cast<size_t>(words) + static_cast<size_t>(w);
#pragma unroll
    for (int p = 0; p < In::kParts; ++p) {
      lane.part[p][at] = word[p];
      any[p] |= word[p] & 0x7FFF7FFFU;
    }
  }
  int parts = 0;
#pragma unroll
  for (int p = 0; p < In::kParts; ++p) {
    if (__any_sync(kWholeWarp, any[p] != 0 ? 1 : 0) != 0) parts = p + 1;
  }
  if (t != 0) return;
  lane.parts[row] = parts;
  lane.row_scale[row] = ldexpf(lane.scale, -shift);
}

__device__ __forceinline__ void PrepareRow(const Lane<float>& lane, uint32_t row) {
  const int t = static_cast<int>(threadIdx.x % kWarpThreads);
  const float* const query = lane.query + size_t{row} * static_cast<size_t>(lane.head_dim);
  const int head_dim = row < lane.rows ? lane.head_dim : 0;
  for (int d = t; d < lane.padded_dim; d += kWarpThreads) {
    lane.part[0][size_t{row} * static_cast<size_t>(lane.padded_dim) + static_cast<size_t>(d)] =
        d < head_dim ? query[d] : 0.0F;
  }
  if (t == 0) lane.row_scale[row] = lane.scale;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    PrepareQueries(const Lane<T>* lanes, unsigned lane_blocks) {
  const Lane<T> lane = lanes[LaneOf(lane_blocks)];
  const int t = static_cast<int>(threadIdx.x % kWarpThreads);
  const uint32_t row = PartOf(lane_blocks) * kWarps + threadIdx.x / kWarpThreads;
  if (row >= lane.padded_rows) return;
  PrepareRow(lane, row);
  if (t == 0) {
    lane.seen_below[row] = row < lane.rows ? SeenBelow(lane.query_index[row % lane.queries]) : 0U;
  }
  if (row != 0) return;
  int32_t newest = kNoToken;
  for (uint32_t m = static_cast<uint32_t>(t); m < lane.queries; m += kWarpThreads) {
    newest = max(newest, lane.query_index[m]);
  }
  newest = WarpJoin(newest, [](int32_t a, int32_t b) { return max(a, b); });
  if (t == 0) *lane.most_seen_below = SeenBelow(newest);
}

}  // namespace ebbtide::gpu::window
