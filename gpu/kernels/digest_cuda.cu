// SPDX-License-Identifier: Apache-2.0
//
// Digests: one block for each page, first a thread for each channel down the tokens, then a warp
// for each token along the channels, out of the cache. Sums are f64, two for each element read: an
// H100 keeps up with its memory, a device with few f64 units is bound by them.

#include "gpu/kernels/digest.h"

#include <vector>

#include "gpu/cuda/block.cuh"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/rows.cuh"
#include "gpu/cuda/warp.cuh"

namespace ebbtide::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr double kSlack = 1 + 1e-12;  // Far more than a sum of 256 terms is off in f64.

struct Page {
  const std::byte* rows[2];  // Keys, values.
  std::byte* digest;
  int32_t tokens;
  int32_t head_dim;
  Dtype dtype;
};

// The nearest finite f16.
__device__ __forceinline__ __half StoredMean(double mean) {
  return __double2half(fmin(fmax(mean, -65504.0), 65504.0));
}

// Boxes and means of both halves; returns the thread's squares of what storing the keys' mean
// changed.
template <class T>
__device__ double DownChannels(const Page& page, float* value_mean) {
  const auto dim = static_cast<size_t>(page.head_dim);
  double off_squares = 0;
  for (size_t d = threadIdx.x; d < dim; d += kThreads) {
    for (int half = 0; half < 2; ++half) {
      const std::byte* at = page.rows[half] + d * sizeof(T);
      float low = Element<T>::Widen(ReadAt<T>(at));
      float high = low;
      double sum = 0;
      for (int j = 0; j < page.tokens; ++j, at += dim * sizeof(T)) {
        const float x = Element<T>::Widen(ReadAt<T>(at));
        low = fminf(low, x);
        high = fmaxf(high, x);
        sum += static_cast<double>(x);
      }
      const double mean = sum / static_cast<double>(page.tokens);
      const __half stored = StoredMean(mean);
      if (half == 1) {
        value_mean[d] = __half2float(stored);
        WriteAt(page.digest + 2 * (3 * dim + d), stored);
        continue;
      }
      const double off = static_cast<double>(__half2float(stored)) - mean;
      off_squares += off * off;
      WriteAt(page.digest + 2 * d, __float2half_rd(low));
      WriteAt(page.digest + 2 * (dim + d), __float2half_ru(high));
      WriteAt(page.digest + 2 * (2 * dim + d), stored);
    }
  }
  return off_squares;
}

struct Squares {
  double key = 0;
  double value = 0;
  double radius = 0;
};

// The largest of the warp's tokens, each joined over its channels.
template <class T>
__device__ Squares AlongTokens(const Page& page, const float* value_mean) {
  const int t = static_cast<int>(threadIdx.x);
  Squares largest;
  for (int j = t / kWarpThreads; j < page.tokens; j += kWarps) {
    const size_t row = static_cast<size_t>(j) * static_cast<size_t>(page.head_dim);
    Squares sum;
    for (int d = t % kWarpThreads; d < page.head_dim; d += kWarpThreads) {
      const size_t at = (row + static_cast<size_t>(d)) * sizeof(T);
      const auto key = static_cast<double>(Element<T>::Widen(ReadAt<T>(page.rows[0] + at)));
      const auto value = static_cast<double>(Element<T>::Widen(ReadAt<T>(page.rows[1] + at)));
      const double off = value - static_cast<double>(value_mean[d]);
      sum.key += key * key;
      sum.value += value * value;
      sum.radius += off * off;
    }
    largest.key = fmax(largest.key, WarpJoin(sum.key, Plus{}));
    largest.value = fmax(largest.value, WarpJoin(sum.value, Plus{}));
    largest.radius = fmax(largest.radius, WarpJoin(sum.radius, Plus{}));
  }
  return largest;
}

template <class T>
__global__ void __launch_bounds__(kThreads) DigestPages(const Page* pages) {
  __shared__ float value_mean[kHeadDimMax];
  const Page page = pages[blockIdx.x];
  const double off = JoinBlock<kThreads>(DownChannels<T>(page, value_mean), Plus{});
  const Squares mine = AlongTokens<T>(page, value_mean);
  const double key = sqrt(JoinBlock<kThreads>(mine.key, Larger64{}));
  const double value = sqrt(JoinBlock<kThreads>(mine.value, Larger64{}));
  const double radius = sqrt(JoinBlock<kThreads>(mine.radius, Larger64{}));
  if (threadIdx.x != 0) return;
  // The mean's own rounding in f64, for means far smaller than what they are means of.
  const double mean_error = sqrt(off) + (kSlack - 1) * key;
  const DigestTail tail = {.value_radius = RoundUp32(radius * kSlack),
                           .value_norm_max = RoundUp32(value * kSlack),
                           .key_norm_max = RoundUp32(key * kSlack),
                           .key_mean_error = RoundUp32(mean_error * kSlack),
                           .tokens = page.tokens,
                           .reserved = 0};
  WriteAt(page.digest + 8 * static_cast<size_t>(page.head_dim), tail);
}

}  // namespace

absl::Status DigestCuda(std::span<const DigestArgs> lanes, CudaStream& stream) {
  for (const Dtype dtype : kDtypes) {
    std::vector<Page> pages;
    for (const DigestArgs& args : lanes) {
      if (args.shape.dtype != dtype) continue;
      CheckDigest(args);
      pages.push_back({.rows = {args.page.data(), args.page.data() + args.shape.half_bytes()},
                       .digest = args.digest.data(),
                       .tokens = args.tokens,
                       .head_dim = args.shape.head_dim,
                       .dtype = dtype});
    }
    if (pages.empty()) continue;
    EBBTIDE_ASSIGN_OR_RETURN(const Page* there, stream.Upload(std::span<const Page>(pages)));
    EBBTIDE_RETURN_IF_ERROR(WithElement(dtype, [&](auto element) {
      return Launch(stream,
                    {.operation = "digest", .grid = GridOf(pages.size(), 1), .threads = kThreads},
                    &DigestPages<typename decltype(element)::Type>, there);
    }));
  }
  return absl::OkStatus();
}

}  // namespace ebbtide::gpu
