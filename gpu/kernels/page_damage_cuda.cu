// SPDX-License-Identifier: Apache-2.0
//
// Page CAOTE from the partial attentions of pages: a warp for each page, which goes over its rows
// and adds squares up in f64; threads of a warp share the channels of a row.
//
// A row has one page at most that holds more than half of its weight (of two halves, the usual form
// serves both). A launch before, a block for each row, finds it and works out what the row would
// attend to without it, each warp for every fourth page. Expected: bound by memory.

#include "gpu/kernels/page_damage.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "gpu/cuda/block.cuh"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/warp.cuh"
#include "gpu/shape.h"

namespace ebbtide::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kMine = kHeadDimMax / kWarpThreads;  // Channels of a thread.
constexpr int kNoPage = -1;
constexpr float kLargest = std::numeric_limits<float>::max();

struct Lane {
  const float* part_output;
  const float* part_lse;
  const float* output;
  const float* lse;
  const float* rest_output;
  const float* rest_lse;  // Null: the rows attended to nothing else.
  float* damage;
  int32_t head_dim, rows, pages;
  uint32_t first_row;  // In lists of a row each.

  __device__ __forceinline__ size_t At(int page, int row) const {
    return static_cast<size_t>(page) * static_cast<size_t>(rows) + static_cast<size_t>(row);
  }
  __device__ __forceinline__ const float* Part(int page, int row) const {
    return part_output + At(page, row) * static_cast<size_t>(head_dim);
  }
};

// A row's page of a weight above 1/2.
struct Heavy {
  int32_t page;   // Or kNoPage.
  double square;  // What it adds to its damage, squared.
};

// What a page weighs beside the largest of others.
__device__ __forceinline__ double PageWeight(float lse, float largest) {
  return lse == -INFINITY ? 0.0 : exp(static_cast<double>(lse) - static_cast<double>(largest));
}

struct Shared {
  double output[kWarps * kHeadDimMax];
  double mass[kWarps];
};

// What the warp's pages of a row, but for one, add up to: to shared.
__device__ void SumOthers(const Lane& lane, int row, int left_out, float peak, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x) % kWarpThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpThreads;
  double mass = 0;
  double output[kMine] = {};
  const auto add = [&](float lse, const float* part) {
    const double weight = PageWeight(lse, peak);
    if (weight == 0) return;
    mass += weight;
#pragma unroll
    for (int mine = 0; mine < kMine; ++mine) {
      const int d = thread + mine * kWarpThreads;
      if (d < lane.head_dim) {
        output[mine] = fma(weight, static_cast<double>(part[d]), output[mine]);
      }
    }
  };
  for (int p = warp; p < lane.pages; p += kWarps) {
    if (p != left_out) add(lane.part_lse[lane.At(p, row)], lane.Part(p, row));
  }
  if (warp == 0 && lane.rest_lse != nullptr) {
    add(lane.rest_lse[row], lane.rest_output + static_cast<ptrdiff_t>(row) * lane.head_dim);
  }
#pragma unroll
  for (int mine = 0; mine < kMine; ++mine) {
    shared.output[warp * kHeadDimMax + thread + mine * kWarpThreads] = output[mine];
  }
  if (thread == 0) shared.mass[warp] = mass;
}

// (e * |output without the page - what it attends to by itself|)^2, by a block; every thread gets
// it.
__device__ double HeavySquare(const Lane& lane, int row, int page, float others_peak) {
  __shared__ Shared shared;
  SumOthers(lane, row, page, others_peak, shared);
  __syncthreads();
  double mass = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) mass += shared.mass[w];
  const float* const part = lane.Part(page, row);
  double squares = 0;
  for (int d = static_cast<int>(threadIdx.x); d < lane.head_dim; d += kThreads) {
    double sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += shared.output[w * kHeadDimMax + d];
    const double off = (mass == 0 ? 0.0 : sum / mass) - static_cast<double>(part[d]);
    squares = fma(off, off, squares);
  }
  const double share = fmin(1.0, PageWeight(lane.part_lse[lane.At(page, row)], lane.lse[row]));
  return share * share * JoinBlock<kThreads>(squares, Plus{});
}

__global__ void __launch_bounds__(kThreads, 8)
    FindHeavy(const Lane* lanes, Heavy* heavy, unsigned lane_blocks) {
  const Lane lane = lanes[LaneOf(lane_blocks)];
  const auto row = static_cast<int>(PartOf(lane_blocks));
  if (row >= lane.rows) return;
  const int t = static_cast<int>(threadIdx.x);
  float largest = -INFINITY;
  for (int p = t; p < lane.pages; p += kThreads) {
    largest = fmaxf(largest, lane.part_lse[lane.At(p, row)]);
  }
  largest = JoinBlock<kThreads>(largest, Larger{});
  // How many have as much, the last of them, and the largest of the others.
  int count = 0;
  int page = kNoPage;
  float others = lane.rest_lse == nullptr ? -INFINITY : lane.rest_lse[row];
  for (int p = t; p < lane.pages; p += kThreads) {
    const float lse = lane.part_lse[lane.At(p, row)];
    if (lse == largest) {
      ++count;
      page = p;
    } else {
      others = fmaxf(others, lse);
    }
  }
  count = JoinBlock<kThreads>(count, Plus{});
  page = JoinBlock<kThreads>(page, Larger64{});
  others = JoinBlock<kThreads>(others, Larger{});
  const bool is_heavy =
      count == 1 && lane.lse[row] != -INFINITY && PageWeight(largest, lane.lse[row]) > 0.5;
  const double square = is_heavy ? HeavySquare(lane, row, page, others) : 0.0;
  if (t == 0)
    heavy[lane.first_row + static_cast<uint32_t>(row)] = {is_heavy ? page : kNoPage, square};
}

// What a row's distance from a page is worth, squared; 0 where the row sees nothing, or nothing of
// it.
__device__ __forceinline__ double Factor(float part_lse, float lse) {
  if (part_lse == -INFINITY || lse == -INFINITY) return 0;
  // e / (1 - e) = 1 / (1 / e - 1); the page is not heavy, so above 1 it is rounding.
  const double inverse = expm1(static_cast<double>(lse) - static_cast<double>(part_lse));
  const double factor = 1 / fmax(inverse, 1.0);
  return factor * factor;
}

// The squared distance of a row's output from a page's: the thread's channels of it.
__device__ __forceinline__ double ThreadSquares(const Lane& lane, int page, int row) {
  const float* const part = lane.Part(page, row);
  const float* const output = lane.output + static_cast<ptrdiff_t>(row) * lane.head_dim;
  double squares = 0;
#pragma unroll 4
  for (int d = static_cast<int>(threadIdx.x) % kWarpThreads; d < lane.head_dim; d += kWarpThreads) {
    const auto off = static_cast<double>(output[d] - __ldcs(part + d));
    squares = fma(off, off, squares);
  }
  return squares;
}

__global__ void __launch_bounds__(kThreads, 8)
    PageDamage(const Lane* lanes, const Heavy* heavy, unsigned lane_blocks) {
  const Lane lane = lanes[LaneOf(lane_blocks)];
  const auto page = static_cast<int>(PartOf(lane_blocks) * kWarps + threadIdx.x / kWarpThreads);
  if (page >= lane.pages) return;
  const int thread = static_cast<int>(threadIdx.x) % kWarpThreads;
  double squares = 0;
  for (int base = 0; base < lane.rows; base += kWarpThreads) {
    double factor = 0;  // Of row base + thread.
    const int mine = base + thread;
    if (mine < lane.rows) {
      const Heavy own = heavy[lane.first_row + static_cast<uint32_t>(mine)];
      if (own.page == page) {
        squares += own.square;
      } else {
        factor = Factor(lane.part_lse[lane.At(page, mine)], lane.lse[mine]);
      }
    }
    for (int r = 0; r < min(lane.rows - base, kWarpThreads); ++r) {
      const double worth = __shfl_sync(kWholeWarp, factor, r);
      if (worth != 0) squares = fma(worth, ThreadSquares(lane, page, base + r), squares);
    }
  }
  squares = WarpJoin(squares, Plus{});
  if (thread == 0) {
    lane.damage[page] = static_cast<float>(fmin(sqrt(squares), static_cast<double>(kLargest)));
  }
}

}  // namespace

absl::Status PageDamageCuda(std::span<const PageDamageArgs> lanes, CudaStream& stream) {
  std::vector<Lane> list;
  uint32_t rows = 0;
  int rows_max = 0;
  int pages_max = 0;
  for (const PageDamageArgs& args : lanes) {
    CheckPageDamage(args);
    list.push_back({.part_output = args.part_output.data(),
                    .part_lse = args.part_lse.data(),
                    .output = args.output.data(),
                    .lse = args.lse.data(),
                    .rest_output = args.rest_output.data(),
                    .rest_lse = args.rest_lse.empty() ? nullptr : args.rest_lse.data(),
                    .damage = args.damage.data(),
                    .head_dim = args.head_dim,
                    .rows = args.rows,
                    .pages = args.pages,
                    .first_row = rows});
    rows += static_cast<uint32_t>(args.rows);
    rows_max = std::max(rows_max, args.rows);
    pages_max = std::max(pages_max, args.pages);
  }
  if (pages_max == 0) return absl::OkStatus();
  EBBTIDE_ASSIGN_OR_RETURN(const Lane* there, stream.Upload(std::span<const Lane>(list)));
  EBBTIDE_ASSIGN_OR_RETURN(Heavy* const heavy, stream.Scratch<Heavy>(rows));
  const unsigned row_blocks = BlocksOf(static_cast<size_t>(rows_max), 1);
  EBBTIDE_RETURN_IF_ERROR(Launch(
      stream,
      {.operation = "page damage", .grid = GridOf(list.size(), row_blocks), .threads = kThreads},
      &FindHeavy, there, heavy, row_blocks));
  const unsigned page_blocks = BlocksOf(static_cast<size_t>(pages_max), kWarps);
  return Launch(
      stream,
      {.operation = "page damage", .grid = GridOf(list.size(), page_blocks), .threads = kThreads},
      &PageDamage, there, heavy, page_blocks);
}

}  // namespace ebbtide::gpu
