// SPDX-License-Identifier: Apache-2.0
//
// Bounds from digests: one warp for each page and tile of rows, its threads over the channels, then
// one thread for each row through the formulas. As the reference in all but the order of sums: f64,
// which an H100 has half as many units for as for f32, and moved outward by far more than f64 is
// off. A digest is read once per tile, from the cache after the first.

#include "gpu/kernels/bound.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "gpu/cuda/block.cuh"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/warp.cuh"
#include "gpu/kernels/digest.h"

namespace ebbtide::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kBlockPages = kThreads / kWarpThreads;
constexpr int kTileRows = 4;
constexpr double kSlack = 1e-12;

// What both operations know of a lane. The second halves of args differ.
struct BoundLane {
  const float* query;
  const std::byte* const* digest;
  const int32_t* absent;
  const float* resident_sum;    // Null: no page has resident tokens.
  const float* resident_error;  // Null: sums are exact.
  float* low;
  float* high;
  float* estimate;
  int32_t head_dim;
  int32_t rows;
  int32_t pages;
  float scale;
};

struct DistanceLane {
  const float* output;
  const std::byte* const* digest;
  float* distance;
  int32_t head_dim;
  int32_t rows;
  int32_t pages;
};

// The warp's page, or -1.
template <class Lane>
__device__ __forceinline__ int PageOf(const Lane& lane, unsigned lane_blocks) {
  const auto page =
      static_cast<int>(PartOf(lane_blocks) * kBlockPages + threadIdx.x / kWarpThreads);
  return page < lane.pages ? page : -1;
}

__device__ __forceinline__ DigestTail TailOf(const std::byte* digest, int head_dim) {
  return ReadAt<DigestTail>(digest + 8 * static_cast<size_t>(head_dim));
}

// Sums over the channels of a row against a page: scale q . box edges, scale q . mean, q . q.
struct Sums {
  double low = 0;
  double high = 0;
  double mean = 0;
  double squares = 0;
};

__device__ __forceinline__ Sums RowSums(const BoundLane& lane, const std::byte* digest, int row) {
  const float* const query =
      lane.query + static_cast<size_t>(row) * static_cast<size_t>(lane.head_dim);
  Sums sums;
  for (int d = static_cast<int>(threadIdx.x) % kWarpThreads; d < lane.head_dim; d += kWarpThreads) {
    const auto element = static_cast<double>(query[d]);
    const double q = static_cast<double>(lane.scale) * element;
    sums.squares += element * element;
    sums.mean += q * static_cast<double>(HalfAt(digest, 2 * lane.head_dim + d));
    if (q == 0) continue;  // The box may be infinite; the key is not.
    const double at_low = q * static_cast<double>(HalfAt(digest, d));
    const double at_high = q * static_cast<double>(HalfAt(digest, lane.head_dim + d));
    sums.low += fmin(at_low, at_high);
    sums.high += fmax(at_low, at_high);
  }
  return {WarpJoin(sums.low, Plus{}), WarpJoin(sums.high, Plus{}), WarpJoin(sums.mean, Plus{}),
          WarpJoin(sums.squares, Plus{})};
}

// As in bound_reference.cc.
__device__ double Chord(double a, double b, double t) {
  const double width = b - a;
  if (!(width > 0 && width < static_cast<double>(INFINITY))) return b;
  const double share_at_b = fmin(fmax((t - a) / width, 0.0), 1.0);
  return b + log(fmax(share_at_b + (1 - share_at_b) * exp(-width), 1e-300));
}

struct Mean {
  double logit;
  double open;  // The exact mean is no further away.
};

__device__ Mean AbsentMean(const BoundLane& lane, const DigestTail& tail, const Sums& sums, int row,
                           int page) {
  const int absent = lane.absent[page];
  const int resident = tail.tokens - absent;
  const double size = fabs(static_cast<double>(lane.scale)) * sqrt(sums.squares);
  double sum = static_cast<double>(tail.tokens) * sums.mean;
  double open =
      static_cast<double>(tail.tokens) * (size * static_cast<double>(tail.key_mean_error) +
                                          kSlack * size * static_cast<double>(tail.key_norm_max));
  if (resident > 0) {
    const size_t at =
        static_cast<size_t>(row) * static_cast<size_t>(lane.pages) + static_cast<size_t>(page);
    const auto known = static_cast<double>(lane.resident_sum[at]);
    const double error =
        lane.resident_error == nullptr ? 0 : static_cast<double>(lane.resident_error[row]);
    sum -= known;
    open += resident * error + 0x1p-24 * fabs(known) + 0x1p-149;
  }
  return {sum / absent, open / absent};
}

__device__ void StoreBound(const BoundLane& lane, const DigestTail& tail, const Sums& sums, int row,
                           int page) {
  const double norms = fabs(static_cast<double>(lane.scale)) * sqrt(sums.squares) *
                       static_cast<double>(tail.key_norm_max);
  const double lowest = fmax(sums.low, -norms) - kSlack * norms;
  const double highest = fmin(sums.high, norms) + kSlack * norms;
  const Mean mean = AbsentMean(lane, tail, sums, row, page);
  const double count = log(static_cast<double>(lane.absent[page]));
  const double slack = kSlack * (1 + fmax(fabs(lowest), fabs(highest)));
  const double jensen = fmax(lowest, mean.logit - mean.open);
  const double chord = Chord(lowest, highest, fmin(highest, mean.logit + mean.open));
  const double low = count + jensen - slack;
  const double high = count + chord + slack;
  const size_t at =
      static_cast<size_t>(row) * static_cast<size_t>(lane.pages) + static_cast<size_t>(page);
  lane.low[at] = std::isnan(low) ? -INFINITY : RoundDown32(low);
  lane.high[at] = std::isnan(high) ? INFINITY : RoundUp32(high);
  lane.estimate[at] = static_cast<float>(count + fmin(fmax(mean.logit, lowest), highest));
}

__global__ void __launch_bounds__(kThreads)
    BoundPages(const BoundLane* lanes, unsigned lane_blocks) {
  const BoundLane& lane = lanes[LaneOf(lane_blocks)];
  const int page = PageOf(lane, lane_blocks);
  if (page < 0) return;
  const std::byte* const digest = lane.digest[page];
  const DigestTail tail = TailOf(digest, lane.head_dim);
  EBBTIDE_DEVICE_CHECK(lane.absent[page] >= 1 && lane.absent[page] <= tail.tokens,
                       "bound: absent is 1 to the tokens of its page");
  EBBTIDE_DEVICE_CHECK(lane.absent[page] == tail.tokens || lane.resident_sum != nullptr,
                       "bound: a page has resident tokens but no resident_logit_sum");
  const int t = static_cast<int>(threadIdx.x) % kWarpThreads;
  for (int first = 0; first < lane.rows; first += kTileRows) {
    Sums mine;  // Of the row that is this thread's to finish.
    for (int r = first; r < min(first + kTileRows, lane.rows); ++r) {
      const Sums sums = RowSums(lane, digest, r);
      if (t == r - first) mine = sums;
    }
    if (t < kTileRows && first + t < lane.rows) StoreBound(lane, tail, mine, first + t, page);
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kThreads)
    DistancePages(const DistanceLane* lanes, unsigned lane_blocks) {
  const DistanceLane& lane = lanes[LaneOf(lane_blocks)];
  const int page = PageOf(lane, lane_blocks);
  if (page < 0) return;
  const std::byte* const digest = lane.digest[page];
  const DigestTail tail = TailOf(digest, lane.head_dim);
  const int t = static_cast<int>(threadIdx.x) % kWarpThreads;
  for (int r = 0; r < lane.rows; ++r) {
    const float* const output =
        lane.output + static_cast<size_t>(r) * static_cast<size_t>(lane.head_dim);
    double off_squares = 0;
    double squares = 0;
    for (int d = t; d < lane.head_dim; d += kWarpThreads) {
      const auto x = static_cast<double>(output[d]);
      const double off = static_cast<double>(HalfAt(digest, 3 * lane.head_dim + d)) - x;
      off_squares += off * off;
      squares += x * x;
    }
    off_squares = WarpJoin(off_squares, Plus{});
    squares = WarpJoin(squares, Plus{});
    if (t != 0) continue;
    const double distance = fmin(sqrt(off_squares) + static_cast<double>(tail.value_radius),
                                 sqrt(squares) + static_cast<double>(tail.value_norm_max));
    lane.distance[static_cast<size_t>(r) * static_cast<size_t>(lane.pages) +
                  static_cast<size_t>(page)] = RoundUp32(distance * (1 + kSlack));
  }
}

// The lists of digests of all lanes, one after the other.
absl::StatusOr<const std::byte* const*> UploadDigests(const std::vector<const std::byte*>& digests,
                                                      CudaStream& stream) {
  return stream.Upload(std::span<const std::byte* const>(digests));
}

template <class Lane>
absl::Status RunPages(const char* operation, std::vector<Lane>& lanes,
                      const std::vector<const std::byte*>& digests, CudaStream& stream,
                      void (*kernel)(const Lane*, unsigned)) {
  if (digests.empty()) return absl::OkStatus();
  EBBTIDE_ASSIGN_OR_RETURN(const std::byte* const* next, UploadDigests(digests, stream));
  int pages = 0;
  for (Lane& lane : lanes) {
    lane.digest = next;
    next += lane.pages;
    pages = std::max(pages, lane.pages);
  }
  EBBTIDE_ASSIGN_OR_RETURN(const Lane* there, stream.Upload(std::span<const Lane>(lanes)));
  const unsigned lane_blocks = BlocksOf(static_cast<size_t>(pages), kBlockPages);
  return Launch(
      stream,
      {.operation = operation, .grid = GridOf(lanes.size(), lane_blocks), .threads = kThreads},
      kernel, there, lane_blocks);
}

}  // namespace

absl::Status BoundCuda(std::span<const BoundArgs> lanes, CudaStream& stream) {
  std::vector<BoundLane> list;
  std::vector<const std::byte*> digests;
  for (const BoundArgs& args : lanes) {
    CheckBound(args);
    if (args.rows == 0) continue;
    list.push_back(
        {.query = args.query.data(),
         .digest = nullptr,
         .absent = args.absent.data(),
         .resident_sum = args.resident_logit_sum.empty() ? nullptr : args.resident_logit_sum.data(),
         .resident_error =
             args.resident_logit_error.empty() ? nullptr : args.resident_logit_error.data(),
         .low = args.mass_low.data(),
         .high = args.mass_high.data(),
         .estimate = args.mass_estimate.data(),
         .head_dim = args.head_dim,
         .rows = args.rows,
         .pages = args.pages,
         .scale = args.scale});
    digests.insert(digests.end(), args.digest.begin(), args.digest.end());
  }
  return RunPages("bound", list, digests, stream, &BoundPages);
}

absl::Status ValueDistanceCuda(std::span<const ValueDistanceArgs> lanes, CudaStream& stream) {
  std::vector<DistanceLane> list;
  std::vector<const std::byte*> digests;
  for (const ValueDistanceArgs& args : lanes) {
    CheckValueDistance(args);
    if (args.rows == 0) continue;
    list.push_back({.output = args.output.data(),
                    .digest = nullptr,
                    .distance = args.distance.data(),
                    .head_dim = args.head_dim,
                    .rows = args.rows,
                    .pages = args.pages});
    digests.insert(digests.end(), args.digest.begin(), args.digest.end());
  }
  return RunPages("value distance", list, digests, stream, &DistancePages);
}

}  // namespace ebbtide::gpu
