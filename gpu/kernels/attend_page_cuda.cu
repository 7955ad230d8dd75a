// SPDX-License-Identifier: Apache-2.0
//
// Attention over decoded pages, a warp for each row of one. Logits: threads over channels, 32
// tokens at a time, their sums reduced together, so that each thread ends up with one token of
// them. Outputs and spreads: threads over channels, shares sent round. A page is read once for keys
// and twice for values by each row, from the cache that its block's four rows share.

#include "gpu/kernels/attend_page.h"

#include <algorithm>
#include <vector>

#include "gpu/cuda/block.cuh"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/warp.cuh"

namespace ebbtide::gpu {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpThreads;
constexpr int kHalves = kPageTokensMax / kWarpThreads;  // Of a page's tokens, one a thread.

struct Page {
  const float* query;
  const float* key;
  const float* value;
  const uint64_t* visible;
  float* output;
  float* lse;
  float* focal_output;
  Spread* spread;
  float* logits;  // Null: not wanted.
  int32_t rows;
  int32_t tokens;
  int32_t head_dim;
  float scale;
};

// One row of a page, by a warp: thread t holds what is of tokens t and t + 32, and of channels t,
// t + 32 and so on.
template <int kChannels>
class Row {
 public:
  __device__ Row(const Page& page, int row)
      : page_(page), row_(row), t_(static_cast<int>(threadIdx.x % kWarpThreads)) {}

  __device__ void Run() {
    Logits();
    Shares();
    float output[kChannels];
    float focal[kChannels];
    Means(output, focal);
    Spreads(output, focal);
  }

 private:
  // Calls use(c, d) for each of the thread's channels that the page has.
  template <class Use>
  __device__ __forceinline__ void EachChannel(Use use) const {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const int d = c * kWarpThreads + t_;
      if (d < page_.head_dim) use(c, d);
    }
  }
  __device__ __forceinline__ size_t RowAt(int d) const {
    return static_cast<size_t>(row_) * static_cast<size_t>(page_.head_dim) + static_cast<size_t>(d);
  }

  __device__ void Logits() {
    float query[kChannels] = {};
    EachChannel([&](int c, int d) { query[c] = page_.query[RowAt(d)]; });
    const uint64_t seen = page_.visible[row_];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int first = half * kWarpThreads;
      weight_[half] = -INFINITY;
      if (first >= page_.tokens) continue;
      float sum[kWarpThreads];
#pragma unroll
      for (int i = 0; i < kWarpThreads; ++i) {
        // Behind the last token the last once more.
        const float* const key = page_.key + min(first + i, page_.tokens - 1) * page_.head_dim;
        sum[i] = 0;
        EachChannel([&](int c, int d) { sum[i] = fmaf(query[c], key[d], sum[i]); });
      }
      TransposeSum<kWarpThreads, kWarpThreads>(sum, t_);
      const int token = first + t_;
      if (token >= page_.tokens) continue;
      if ((seen >> token & 1) != 0) weight_[half] = page_.scale * sum[0];
      if (page_.logits != nullptr) page_.logits[row_ * page_.tokens + token] = weight_[half];
    }
  }

  // Logits to shares, and the sum of their squares.
  __device__ void Shares() {
    float peak = -INFINITY;
#pragma unroll
    for (const float logit : weight_) peak = fmaxf(peak, logit);
    peak = WarpJoin(peak, Larger{});
    float total = 0;
#pragma unroll
    for (float& weight : weight_) {
      weight = weight == -INFINITY ? 0.0F : Exp(weight - peak);
      total += weight;
    }
    total = WarpJoin(total, Plus{});
    float squares = 0;
#pragma unroll
    for (float& weight : weight_) {
      if (total != 0) weight /= total;
      squares = fmaf(weight, weight, squares);
    }
    focus_ = WarpJoin(squares, Plus{});
    if (t_ != 0) return;
    page_.lse[row_] =
        total == 0
            ? -INFINITY
            : static_cast<float>(static_cast<double>(peak) + log(static_cast<double>(total)));
  }

  // Calls use(value, share) for each token with its value's row.
  template <class Use>
  __device__ __forceinline__ void EachToken(Use use) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int count = min(page_.tokens - half * kWarpThreads, kWarpThreads);
      for (int i = 0; i < count; ++i) {
        use(page_.value + (half * kWarpThreads + i) * page_.head_dim,
            __shfl_sync(kWholeWarp, weight_[half], i));
      }
    }
  }

  __device__ void Means(float (&output)[kChannels], float (&focal)[kChannels]) const {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) output[c] = focal[c] = 0;
    EachToken([&](const float* value, float share) {
      EachChannel([&](int c, int d) {
        output[c] = fmaf(share, value[d], output[c]);
        focal[c] = fmaf(share * share, value[d], focal[c]);
      });
    });
    EachChannel([&](int c, int d) {
      if (focus_ != 0) focal[c] /= focus_;
      page_.output[RowAt(d)] = output[c];
      page_.focal_output[RowAt(d)] = focal[c];
    });
  }

  __device__ void Spreads(const float (&output)[kChannels], const float (&focal)[kChannels]) const {
    constexpr double kAbove = 1 + 1.2e-4;  // The reference's, and f32.
    constexpr double kUnderflow = 1e-20;   // Products below the normal range lose 2^-150 each.
    float squares = 0;
    float focal_squares = 0;
    EachToken([&](const float* value, float share) {
      EachChannel([&](int c, int d) {
        const float off = value[d] - output[c];
        const float focal_off = value[d] - focal[c];
        squares = fmaf(share * off, off, squares);
        focal_squares = fmaf(share * share * focal_off, focal_off, focal_squares);
      });
    });
    const auto root = [&](float part) {
      const auto sum = static_cast<double>(WarpJoin(part, Plus{}));
      return RoundUp32(sqrt(sum) * kAbove + kUnderflow);
    };
    const float each = root(squares);
    const float focal_each = root(focal_squares);
    if (t_ != 0) return;
    Spread& spread = page_.spread[row_];
    spread = {};
    if (focus_ == 0) return;
    spread.each = each;
    spread.focus = RoundUp32(static_cast<double>(focus_) * kAbove);
    spread.focal = focal_each;
  }

  const Page& page_;
  const int row_;
  const int t_;
  float weight_[kHalves];  // First logits.
  float focus_ = 0;        // 0: the row sees nothing.
};

template <int kChannels>
__global__ void __launch_bounds__(kThreads) AttendPages(const Page* pages, unsigned page_blocks) {
  const Page page = pages[LaneOf(page_blocks)];
  const auto row = static_cast<int>(PartOf(page_blocks) * kWarps + threadIdx.x / kWarpThreads);
  if (row < page.rows) Row<kChannels>(page, row).Run();
}

}  // namespace

absl::Status AttendPageCuda(std::span<const AttendPageArgs> lanes, CudaStream& stream) {
  std::vector<Page> pages;
  int32_t rows = 0;
  int32_t head_dim = 0;
  for (const AttendPageArgs& args : lanes) {
    CheckAttendPage(args);
    rows = std::max(rows, args.rows);
    head_dim = std::max(head_dim, args.head_dim);
    pages.push_back({.query = args.query.data(),
                     .key = args.page.data(),
                     .value = args.page.data() + args.page.size() / 2,
                     .visible = args.visible.data(),
                     .output = args.output.data(),
                     .lse = args.lse.data(),
                     .focal_output = args.focal_output.data(),
                     .spread = args.spread.data(),
                     .logits = args.logits.empty() ? nullptr : args.logits.data(),
                     .rows = args.rows,
                     .tokens = args.tokens,
                     .head_dim = args.head_dim,
                     .scale = args.scale});
  }
  if (rows == 0) return absl::OkStatus();
  EBBTIDE_ASSIGN_OR_RETURN(const Page* there, stream.Upload(std::span<const Page>(pages)));
  const unsigned blocks = BlocksOf(static_cast<size_t>(rows), kWarps);
  const LaunchShape shape = {
      .operation = "attend page", .grid = GridOf(pages.size(), blocks), .threads = kThreads};
  if (head_dim <= 64) return Launch(stream, shape, &AttendPages<2>, there, blocks);
  if (head_dim <= 128) return Launch(stream, shape, &AttendPages<4>, there, blocks);
  return Launch(stream, shape, &AttendPages<8>, there, blocks);
}

}  // namespace ebbtide::gpu
