// SPDX-License-Identifier: Apache-2.0
//
// A window in four launches for all lanes: queries are prepared, each tile of 64 slots (f32: 32)
// weighs its logits for each row, tiles are joined to a row's log-sum-exp, and the logits are
// computed again for each slot to add up what it draws. Keys are read twice rather than rows of
// logits spilled (policies with 8 rows and more; docs/benchmarks.md).
//
// One block takes 256 slots, a tile at a time in shared memory; each of its four warps takes every
// fourth 16 rows. f16 keys go through tensor cores as the columns of m16n8k16 (gpu/cuda/port.h),
// rows of queries as its rows, in two f16 parts (bf16: three); f32 keys take the same places in
// registers and plain products. So a thread holds rows l / 4 and l / 4 + 8 of 16, and of each 8
// slots l % 4 * 2 and the next. No sum depends on blocks or time: a row's partial sums are joined
// in the order of tiles, a slot's in that of rows and warps.

#include "gpu/kernels/window.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gpu/cuda/kernels.h"
#include "gpu/cuda/lanes.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/rows.cuh"
#include "gpu/cuda/splits.cuh"
#include "gpu/cuda/warp.cuh"
#include "gpu/cuda/window_rows.cuh"

namespace ebbtide::gpu {
namespace {

using namespace window;  // NOLINT(google-build-using-namespace): the other half of this file.

// Tiles of rows of at most kDim channels.
template <class T, int kDim>
struct TileShape {
  using Type = T;
  using In = Layout<T>;
  using Word = typename In::Word;
  static constexpr int kDimMax = kDim;
  static constexpr int kSlots = sizeof(T) == 2 ? 64 : 32;  // As many as registers allow.
  static constexpr int kColumns = kSlots / 8;              // Groups of 8 slots.
  // 16 bytes more than a row, so that what a warp reads at once lies in different banks.
  static constexpr int kPitch = kDim / In::kInWord + 4;
};

template <class Shape>
struct Shared {
  alignas(16) typename Shape::Word key[Shape::kSlots * Shape::kPitch];
  const std::byte* row[kSplitSlots];  // Null where no row of the window sees the slot.
  uint32_t index[kSplitSlots];
  float across[kWarps][Shape::kSlots];
};

template <class T>
struct View {
  const Lane<T>* lanes;
  const PlacedExtent* extents;
  const Split* splits;
};

// --- Logits of a tile ---

// Looks up where the split's slots lie that some row sees.
template <class Shape>
__device__ void FindSlots(const View<typename Shape::Type>& view,
                          const Lane<typename Shape::Type>& lane, const Split& split,
                          Shared<Shape>& shared) {
  for (int s = static_cast<int>(threadIdx.x); s < kSplitSlots; s += kThreads) {
    shared.row[s] = nullptr;
    shared.index[s] = static_cast<uint32_t>(kNoToken);
  }
  __syncthreads();
  const uint32_t most_seen_below = *lane.most_seen_below;
  const size_t row_bytes = static_cast<size_t>(lane.head_dim) * sizeof(typename Shape::Type);
  ForEachSlot(view.extents, split, [&](int s, const Extent& extent, int i) {
    const auto index = static_cast<uint32_t>(extent.index[i]);
    if (index >= most_seen_below) return;
    shared.row[s] = extent.key + static_cast<size_t>(i) * row_bytes;
    shared.index[s] = index;
  });
}

// shared.key := the keys of the split's slots from `first` on; zeros where there is nothing.
template <class Shape>
__device__ void LoadTile(const Lane<typename Shape::Type>& lane, Shared<Shape>& shared, int first) {
  using In = typename Shape::In;
  using Piece = typename In::Piece;
  const int t = static_cast<int>(threadIdx.x);
  __syncthreads();  // Whoever used the tile before is done.
  if (lane.head_dim % In::kInPiece == 0) {
    constexpr int kPieces = Shape::kDimMax / In::kInPiece;
#pragma unroll 4
    for (int i = t; i < Shape::kSlots * kPieces; i += kThreads) {
      const int s = i / kPieces;
      const int d = i % kPieces * In::kInPiece;
      if (d >= lane.padded_dim) continue;
      const std::byte* const row = shared.row[first + s];
      const Piece piece = row != nullptr && d < lane.head_dim
                              ? reinterpret_cast<const Piece*>(row)[d / In::kInPiece]
                              : Piece{};
      *reinterpret_cast<Piece*>(&shared.key[s * Shape::kPitch + d / In::kInWord]) = piece;
    }
  } else {
    const int words = lane.padded_dim / In::kInWord;
    for (int i = t; i < Shape::kSlots * words; i += kThreads) {
      const int s = i / words;
      const int w = i % words;
      const std::byte* const row = shared.row[first + s];
      shared.key[s * Shape::kPitch + w] =
          row == nullptr ? typename Shape::Word{} : In::WordAt(row, w, lane.head_dim);
    }
  }
  __syncthreads();
}

// Products of 16 rows from `first` with the tile, on tensor cores.
template <class Shape, class T>
__device__ __forceinline__ void Products(const Lane<T>& lane, const Shared<Shape>& shared,
                                         uint32_t first, float (&sum)[Shape::kColumns][4]) {
  constexpr int kParts = Shape::In::kParts;
  const int t = static_cast<int>(threadIdx.x % kWarpThreads);
  const int words = lane.padded_dim / 2;
  const int parts = lane.parts[first + static_cast<uint32_t>(t % kTileRows)];
  bool has_part[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    has_part[p] = p == 0 || __any_sync(kWholeWarp, parts > p ? 1 : 0) != 0;
  }
  const size_t at = (size_t{first} + t / 4) * static_cast<size_t>(words) + t % 4;
  const unsigned* const key = &shared.key[t / 4 * Shape::kPitch + t % 4];
#pragma unroll 1  // More steps at once would take registers that warps take now.
  for (int w = 0; w < words; w += kStepChannels / 2) {
    unsigned b[Shape::kColumns][2];
#pragma unroll
    for (int n = 0; n < Shape::kColumns; ++n) {
      b[n][0] = key[n * 8 * Shape::kPitch + w];
      b[n][1] = key[n * 8 * Shape::kPitch + w + 4];
    }
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      if (!has_part[p]) continue;
      const unsigned* const upper = lane.part[p] + at + w;
      const unsigned* const lower = upper + 8 * words;
      const unsigned a[4] = {upper[0], lower[0], upper[4], lower[4]};
#pragma unroll
      for (int n = 0; n < Shape::kColumns; ++n) MultiplyAdd16x8x16<T>(sum[n], a, b[n]);
    }
  }
}

// The same in f32, without.
template <class Shape>
__device__ __forceinline__ void Products(const Lane<float>& lane, const Shared<Shape>& shared,
                                         uint32_t first, float (&sum)[Shape::kColumns][4]) {
  const int t = static_cast<int>(threadIdx.x % kWarpThreads);
  const size_t at = (size_t{first} + t / 4) * static_cast<size_t>(lane.padded_dim);
  const float* const upper = lane.part[0] + at;
  const float* const lower = upper + 8 * lane.padded_dim;
  const float* const key = &shared.key[t % 4 * 2 * Shape::kPitch];
  for (int d = 0; d < lane.padded_dim; d += 4) {
    const float4 q[2] = {*reinterpret_cast<const float4*>(upper + d),
                         *reinterpret_cast<const float4*>(lower + d)};
#pragma unroll
    for (int n = 0; n < Shape::kColumns; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 k = *reinterpret_cast<const float4*>(key + (n * 8 + i) * Shape::kPitch + d);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& z = sum[n][2 * h + i];
          z = fmaf(q[h].x, k.x, z);
          z = fmaf(q[h].y, k.y, z);
          z = fmaf(q[h].z, k.z, z);
          z = fmaf(q[h].w, k.w, z);
        }
      }
    }
  }
}

// z[n][2 * h + i] is the logit of the thread's row h and slot i of 8 * n on.
template <class Shape>
__device__ __forceinline__ void Logits(const Lane<typename Shape::Type>& lane,
                                       const Shared<Shape>& shared, int tile_first,
                                       uint32_t first_row, float (&z)[Shape::kColumns][4]) {
  const int t = static_cast<int>(threadIdx.x % kWarpThreads);
#pragma unroll
  for (int n = 0; n < Shape::kColumns; ++n) z[n][0] = z[n][1] = z[n][2] = z[n][3] = 0;
  Products<Shape>(lane, shared, first_row, z);
  const uint32_t row = first_row + static_cast<uint32_t>(t / 4);
  const float scale[2] = {lane.row_scale[row], lane.row_scale[row + 8]};
  const uint32_t seen_below[2] = {lane.seen_below[row], lane.seen_below[row + 8]};
#pragma unroll
  for (int n = 0; n < Shape::kColumns; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t index = shared.index[tile_first + n * 8 + t % 4 * 2 + i];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& logit = z[n][2 * h + i];
        logit = index < seen_below[h] ? logit * scale[h] : -INFINITY;
      }
    }
  }
}

// Calls visit(tile's first slot in the split, first row, z) for each tile of the block's split and
// each 16 rows of this warp; end(tile's first slot) after each tile, by all.
template <class Shape, class Visit, class End>
__device__ __forceinline__ void ForEachTile(const View<typename Shape::Type>& view,
                                            const Lane<typename Shape::Type>& lane,
                                            const Split& split, Shared<Shape>& shared, Visit visit,
                                            End end) {
  FindSlots<Shape>(view, lane, split, shared);
  const int count = SlotsOf(split, lane.slots);
  for (int first = 0; first < count; first += Shape::kSlots) {
    LoadTile<Shape>(lane, shared, first);
    for (uint32_t row = threadIdx.x / kWarpThreads * kTileRows; row < lane.padded_rows;
         row += kWarps * kTileRows) {
      float z[Shape::kColumns][4];
      Logits<Shape>(lane, shared, first, row, z);
      visit(first, row, z);
    }
    end(first);
  }
}

// --- Each row's log-sum-exp ---

template <class Shape>
__global__ void __launch_bounds__(kThreads, 4) WeighTiles(const View<typename Shape::Type> view) {
  __shared__ Shared<Shape> shared;
  const Split split = view.splits[blockIdx.x];
  const auto lane = view.lanes[split.lane];
  const int t = static_cast<int>(threadIdx.x % kWarpThreads);
  ForEachTile<Shape>(
      view, lane, split, shared,
      [&](int first, uint32_t first_row, const float(&z)[Shape::kColumns][4]) {
        const auto tile = static_cast<uint32_t>(
            static_cast<int>(split.number) * (kSplitSlots / Shape::kSlots) + first / Shape::kSlots);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float peak = -INFINITY;
#pragma unroll
          for (int n = 0; n < Shape::kColumns; ++n) {
            peak = fmaxf(peak, fmaxf(z[n][2 * h], z[n][2 * h + 1]));
          }
          peak = fmaxf(peak, __shfl_xor_sync(kWholeWarp, peak, 1));
          peak = fmaxf(peak, __shfl_xor_sync(kWholeWarp, peak, 2));
          const float shift = peak == -INFINITY ? 0.0F : peak;
          float sum = 0;
#pragma unroll
          for (int n = 0; n < Shape::kColumns; ++n) {
            sum += Exp(z[n][2 * h] - shift) + Exp(z[n][2 * h + 1] - shift);
          }
          sum += __shfl_xor_sync(kWholeWarp, sum, 1);
          sum += __shfl_xor_sync(kWholeWarp, sum, 2);
          const uint32_t row = first_row + static_cast<uint32_t>(t / 4 + 8 * h);
          if (t % 4 == 0) lane.peaks[size_t{row} * lane.tiles + tile] = make_float2(peak, sum);
        }
      },
      [](int) {});
}

// A warp for each row: its tiles, in an order that depends on their number alone.
template <class T>
__global__ void __launch_bounds__(kThreads) JoinTiles(const Lane<T>* lanes, unsigned lane_blocks) {
  const Lane<T> lane = lanes[LaneOf(lane_blocks)];
  const uint32_t t = threadIdx.x % kWarpThreads;
  const uint32_t row = PartOf(lane_blocks) * kWarps + threadIdx.x / kWarpThreads;
  if (row >= lane.padded_rows) return;
  const float2* const peaks = lane.peaks + size_t{row} * lane.tiles;
  float largest = -INFINITY;
  for (uint32_t x = t; x < lane.tiles; x += kWarpThreads) largest = fmaxf(largest, peaks[x].x);
  largest = WarpJoin(largest, Larger{});
  double sum = 0;
  for (uint32_t x = t; x < lane.tiles; x += kWarpThreads) {
    const float2 tile = peaks[x];
    if (tile.x == -INFINITY) continue;
    sum += exp(static_cast<double>(tile.x) - static_cast<double>(largest)) *
           static_cast<double>(tile.y);
  }
  sum = WarpJoin(sum, Plus{});
  if (t == 0) {
    lane.lse[row] =
        sum == 0 ? INFINITY : static_cast<float>(static_cast<double>(largest) + log(sum));
  }
}

// --- What each slot draws ---

template <class Shape>
__global__ void __launch_bounds__(kThreads, 4) AddRows(const View<typename Shape::Type> view) {
  __shared__ Shared<Shape> shared;
  const Split split = view.splits[blockIdx.x];
  const auto lane = view.lanes[split.lane];
  const int t = static_cast<int>(threadIdx.x % kWarpThreads);
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  float column[Shape::kColumns][2] = {};  // Of the thread's slots, over its rows.
  ForEachTile<Shape>(
      view, lane, split, shared,
      [&](int /*first*/, uint32_t first_row, const float(&z)[Shape::kColumns][4]) {
        const uint32_t row = first_row + static_cast<uint32_t>(t / 4);
        const float lse[2] = {lane.lse[row], lane.lse[row + 8]};
#pragma unroll
        for (int n = 0; n < Shape::kColumns; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            column[n][i] += Exp(z[n][i] - lse[0]) + Exp(z[n][2 + i] - lse[1]);
          }
        }
      },
      [&](int first) {
#pragma unroll
        for (int n = 0; n < Shape::kColumns; ++n) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int distance = 4; distance < kWarpThreads; distance *= 2) {
              column[n][i] += __shfl_xor_sync(kWholeWarp, column[n][i], distance);
            }
            if (t < 4) shared.across[warp][n * 8 + t * 2 + i] = column[n][i];
            column[n][i] = 0;
          }
        }
        __syncthreads();
        const int s = static_cast<int>(threadIdx.x);
        const uint32_t slot = split.number * kSplitSlots + static_cast<uint32_t>(first + s);
        if (s < Shape::kSlots && slot < lane.slots) {
          float sum = shared.across[0][s];
#pragma unroll
          for (int w = 1; w < kWarps; ++w) sum += shared.across[w][s];
          lane.mass[slot] = sum / static_cast<float>(lane.group);
        }
      });
}

// --- Launches ---

// Hands out scratch, aligned for every type in it; without memory it only counts.
class Room {
 public:
  explicit Room(std::byte* memory) : memory_(memory) {}

  template <class T>
  T* Take(size_t count) {
    std::byte* const taken = memory_ + used_;
    used_ += (count * sizeof(T) + 15) / 16 * 16;
    return reinterpret_cast<T*>(taken);
  }
  size_t used() const { return used_; }

 private:
  std::byte* memory_;
  size_t used_ = 0;
};

size_t RowsOf(const WindowArgs& args) {
  return static_cast<size_t>(args.group) * static_cast<size_t>(args.queries);
}

template <class Shape>
void TakeRoom(Lane<typename Shape::Type>& lane, Room& room) {
  using Word = typename Shape::Word;
  const size_t rows = lane.padded_rows;
  const size_t words =
      rows * static_cast<size_t>(lane.padded_dim) / static_cast<size_t>(Shape::In::kInWord);
  for (Word*& part : lane.part) part = room.Take<Word>(words);
  lane.parts = room.Take<int32_t>(rows);
  lane.row_scale = room.Take<float>(rows);
  lane.seen_below = room.Take<uint32_t>(rows);
  lane.most_seen_below = room.Take<uint32_t>(1);
  lane.peaks = room.Take<float2>(rows * lane.tiles);
  lane.lse = room.Take<float>(rows);
}

template <class Shape>
Lane<typename Shape::Type> LaneOfArgs(const WindowArgs& args) {
  const auto rows = static_cast<uint32_t>(RowsOf(args));
  const auto slots = static_cast<uint32_t>(args.mass.size());
  return {.query = args.query.data(),
          .query_index = args.query_index.data(),
          .mass = args.mass.data(),
          .part = {},
          .parts = nullptr,
          .row_scale = nullptr,
          .seen_below = nullptr,
          .most_seen_below = nullptr,
          .peaks = nullptr,
          .lse = nullptr,
          .rows = rows,
          .padded_rows = (rows + kTileRows - 1) / kTileRows * kTileRows,
          .queries = static_cast<uint32_t>(args.queries),
          .slots = slots,
          .tiles = (slots + Shape::kSlots - 1) / Shape::kSlots,
          .head_dim = args.head_dim,
          .padded_dim = (args.head_dim + kStepChannels - 1) / kStepChannels * kStepChannels,
          .group = args.group,
          .scale = args.scale};
}

// Lanes whose scratch fits at once.
template <class Shape>
absl::Status RunTogether(std::span<const WindowArgs* const> group,
                         std::vector<Lane<typename Shape::Type>>& lanes, size_t scratch_bytes,
                         CudaStream& stream) {
  using T = typename Shape::Type;
  std::vector<PlacedExtent> extents;
  std::vector<Split> splits;
  EBBTIDE_ASSIGN_OR_RETURN(std::byte* const scratch, stream.Scratch<std::byte>(scratch_bytes));
  Room room(scratch);
  uint32_t rows = 0;
  for (size_t i = 0; i < lanes.size(); ++i) {
    TakeRoom<Shape>(lanes[i], room);
    const size_t row_bytes = static_cast<size_t>(lanes[i].head_dim) * sizeof(T);
    AddSplits(static_cast<uint32_t>(i), PlaceExtents(group[i]->extents, row_bytes, extents),
              splits);
    rows = std::max(rows, lanes[i].padded_rows);
  }
  View<T> view = {};
  EBBTIDE_ASSIGN_OR_RETURN(view.lanes, stream.Upload(std::span<const Lane<T>>(lanes)));
  EBBTIDE_ASSIGN_OR_RETURN(view.extents, stream.Upload(std::span<const PlacedExtent>(extents)));
  EBBTIDE_ASSIGN_OR_RETURN(view.splits, stream.Upload(std::span<const Split>(splits)));
  const unsigned blocks = BlocksOf(rows, kWarps);
  const LaunchShape by_row = {
      .operation = "window", .grid = GridOf(lanes.size(), blocks), .threads = kThreads};
  const LaunchShape by_slot = {
      .operation = "window", .grid = GridOf(splits.size(), 1), .threads = kThreads};
  EBBTIDE_RETURN_IF_ERROR(Launch(stream, by_row, &PrepareQueries<T>, view.lanes, blocks));
  EBBTIDE_RETURN_IF_ERROR(Launch(stream, by_slot, &WeighTiles<Shape>, view));
  EBBTIDE_RETURN_IF_ERROR(Launch(stream, by_row, &JoinTiles<T>, view.lanes, blocks));
  return Launch(stream, by_slot, &AddRows<Shape>, view);
}

template <class Shape>
absl::Status Run(std::span<const WindowArgs* const> group, CudaStream& stream) {
  std::vector<Lane<typename Shape::Type>> lanes;
  size_t scratch_bytes = 0;
  size_t done = 0;
  for (size_t i = 0; i < group.size(); ++i) {
    auto lane = LaneOfArgs<Shape>(*group[i]);
    Room room(nullptr);
    TakeRoom<Shape>(lane, room);
    if (!lanes.empty() && scratch_bytes + room.used() > stream.scratch_bytes_max()) {
      EBBTIDE_RETURN_IF_ERROR(
          RunTogether<Shape>(group.subspan(done, lanes.size()), lanes, scratch_bytes, stream));
      done = i;
      lanes.clear();
      scratch_bytes = 0;
    }
    lanes.push_back(lane);
    scratch_bytes += room.used();
  }
  return RunTogether<Shape>(group.subspan(done), lanes, scratch_bytes, stream);
}

template <class T>
absl::Status RunForDim(std::span<const WindowArgs* const> group, CudaStream& stream) {
  const int head_dim = group[0]->head_dim;
  if (head_dim <= 64) return Run<TileShape<T, 64>>(group, stream);
  if (head_dim <= 128) return Run<TileShape<T, 128>>(group, stream);
  return Run<TileShape<T, kHeadDimMax>>(group, stream);
}

}  // namespace

absl::Status WindowCuda(std::span<const WindowArgs> lanes, CudaStream& stream) {
  std::vector<WindowArgs> asked;  // Who has slots, and rows that could draw from them.
  for (const WindowArgs& args : lanes) {
    CheckWindow(args);
    if (args.mass.empty()) continue;
    if (args.queries > 0) {
      asked.push_back(args);
      continue;
    }
    EBBTIDE_RETURN_IF_ERROR(CudaStatus(
        "window", cudaMemsetAsync(args.mass.data(), 0, args.mass.size_bytes(), stream.handle())));
  }
  return ForEachShape(std::span<const WindowArgs>(asked),
                      [&](std::span<const WindowArgs* const> group) {
                        return WithElement(group[0]->dtype, [&](auto element) {
                          return RunForDim<typename decltype(element)::Type>(group, stream);
                        });
                      });
}

}  // namespace ebbtide::gpu
