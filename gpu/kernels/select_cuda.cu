// SPDX-License-Identifier: Apache-2.0
//
// Who leaves: one block for each lane. (score, index) is one 64-bit key whose order as a number is
// the order of leaving. A radix select, eight bits at a time from the top, narrows down the largest
// key that leaves, and looks at indices only where scores tie; those up to it are then sorted.
// Counting with atomics decides no order: keys are all different.

#include "gpu/kernels/select.h"

#include <algorithm>
#include <bit>
#include <vector>

#include "base/status_macros.h"
#include "gpu/cuda/kernels.h"
#include "gpu/cuda/launch.h"
#include "gpu/cuda/warp.cuh"

namespace ebbtide::gpu {
namespace {

constexpr int kThreads = 512;
constexpr int kDigits = 256;
constexpr int kTopShift = 56;
constexpr int kIndexBits = 32;
constexpr uint64_t kNoKey = ~uint64_t{0};

struct Lane {
  const float* score;
  const int32_t* index;
  const uint8_t* eligible;
  int32_t* leaving;
  int32_t* left;
  uint64_t first_scratch;  // Its part of the scratch: a power of two that holds `count`.
  uint32_t scratch;
  uint32_t tokens;
  uint32_t count;
};

struct Shared {
  unsigned histogram[kDigits];
  unsigned wanted;  // How many of those that share the prefix leave.
  unsigned digit;   // Where the last of them is,
  unsigned taken;   // and how many have this digit.
  unsigned leaving;
};

// Where `wanted` stands among keys, and which of a key's bits are known to be like that.
struct Prefix {
  uint64_t bits = 0;
  uint64_t mask = 0;
};

// A number that is ordered as scores are; zeros of both signs are one.
__device__ __forceinline__ uint32_t Ordered(float score) {
  const uint32_t bits = __float_as_uint(score == 0 ? 0.0F : score);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}

__device__ __forceinline__ uint64_t Key(const Lane& lane, uint32_t token, bool with_index) {
  const uint64_t score = Ordered(lane.score[token]);
  const uint32_t index = with_index ? static_cast<uint32_t>(lane.index[token]) ^ 0x80000000U : 0U;
  return score << kIndexBits | index;
}

// Counts the digit at `shift` of all keys with this prefix.
__device__ void CountDigits(const Lane& lane, const Prefix& prefix, int shift, Shared& shared) {
  for (unsigned d = threadIdx.x; d < kDigits; d += kThreads) shared.histogram[d] = 0;
  __syncthreads();
  for (uint32_t token = threadIdx.x; token < lane.tokens; token += kThreads) {
    if (lane.eligible[token] == 0) continue;
    EBBTIDE_DEVICE_CHECK(shift != kTopShift || lane.score[token] == lane.score[token],
                         "select: a score is NaN");
    const uint64_t key = Key(lane, token, shift < kIndexBits);
    if ((key & prefix.mask) != prefix.bits) continue;
    atomicAdd(&shared.histogram[key >> shift & (kDigits - 1)], 1U);
  }
  __syncthreads();
}

// The first warp finds the digit at which counts reach what is wanted, eight digits a thread.
__device__ void FindDigit(Shared& shared) {
  constexpr unsigned kEach = kDigits / kWarpThreads;
  const unsigned thread = threadIdx.x;
  unsigned sum = 0;
  for (unsigned i = 0; i < kEach; ++i) sum += shared.histogram[thread * kEach + i];
  unsigned up_to = sum;
  for (unsigned distance = 1; distance < kWarpThreads; distance *= 2) {
    const unsigned before = __shfl_up_sync(kWholeWarp, up_to, distance);
    if (thread >= distance) up_to += before;
  }
  const unsigned all = __shfl_sync(kWholeWarp, up_to, kWarpThreads - 1);
  const unsigned wanted = min(shared.wanted, all);  // At first there may be fewer.
  __syncwarp();
  if (wanted == 0) {
    if (thread == 0) shared.wanted = 0;
    return;
  }
  unsigned before = up_to - sum;
  if (before >= wanted || wanted > up_to) return;
  for (unsigned i = 0; i < kEach; ++i) {
    const unsigned count = shared.histogram[thread * kEach + i];
    if (before + count >= wanted) {
      shared.digit = thread * kEach + i;
      shared.taken = count;
      shared.wanted = wanted - before;
      return;
    }
    before += count;
  }
}

// Ascending by key, in place; `size` is a power of two.
__device__ void Sort(uint64_t* keys, int32_t* tokens, uint32_t size) {
  for (uint32_t run = 2; run <= size; run *= 2) {
    for (uint32_t stride = run / 2; stride > 0; stride /= 2) {
      for (uint32_t i = threadIdx.x; i < size / 2; i += kThreads) {
        const uint32_t low = 2 * i - (i & (stride - 1));
        const uint32_t high = low + stride;
        const bool is_ascending = (low & run) == 0;
        if ((keys[low] > keys[high]) != is_ascending) continue;
        const uint64_t key = keys[low];
        const int32_t token = tokens[low];
        keys[low] = keys[high];
        tokens[low] = tokens[high];
        keys[high] = key;
        tokens[high] = token;
      }
      __syncthreads();
    }
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    SelectLowest(const Lane* lanes, uint64_t* keys, int32_t* tokens) {
  __shared__ Shared shared;
  const Lane lane = lanes[blockIdx.x];
  if (threadIdx.x == 0) {
    shared.wanted = lane.count;
    shared.leaving = 0;
  }
  Prefix prefix;
  for (int shift = kTopShift; shift >= 0; shift -= 8) {
    CountDigits(lane, prefix, shift, shared);
    if (threadIdx.x < kWarpThreads) FindDigit(shared);
    __syncthreads();
    if (shared.wanted == 0) break;
    prefix.bits |= static_cast<uint64_t>(shared.digit) << shift;
    prefix.mask |= static_cast<uint64_t>(kDigits - 1) << shift;
    if (shared.wanted == shared.taken) break;  // All that share it leave.
  }
  const bool leaves_any = shared.wanted != 0;
  uint64_t* const lane_keys = keys + lane.first_scratch;
  int32_t* const lane_tokens = tokens + lane.first_scratch;
  for (uint32_t token = threadIdx.x; leaves_any && token < lane.tokens; token += kThreads) {
    if (lane.eligible[token] == 0) continue;
    const uint64_t key = Key(lane, token, true);
    if ((key & prefix.mask) > prefix.bits) continue;
    const unsigned at = atomicAdd(&shared.leaving, 1U);
    EBBTIDE_DEVICE_CHECK(at < lane.count, "select: two tokens have one index");
    lane_keys[at] = key;
    lane_tokens[at] = static_cast<int32_t>(token);
  }
  __syncthreads();
  const unsigned leaving = shared.leaving;
  for (uint32_t i = leaving + threadIdx.x; i < lane.scratch; i += kThreads) lane_keys[i] = kNoKey;
  __syncthreads();
  Sort(lane_keys, lane_tokens, lane.scratch);
  for (uint32_t i = threadIdx.x; i < leaving; i += kThreads) lane.leaving[i] = lane_tokens[i];
  if (threadIdx.x == 0) *lane.left = static_cast<int32_t>(leaving);
}

}  // namespace

absl::Status SelectCuda(std::span<const SelectCudaArgs> lanes, CudaStream& stream) {
  if (lanes.empty()) return absl::OkStatus();
  std::vector<Lane> list;
  size_t scratch = 0;
  for (const SelectCudaArgs& args : lanes) {
    const SelectArgs& select = args.select;
    const size_t count = std::min(select.count, select.score.size());
    EBBTIDE_CHECK(select.index.size() == select.score.size(), "select: index is [tokens]");
    EBBTIDE_CHECK(select.eligible.size() == select.score.size(), "select: eligible is [tokens]");
    EBBTIDE_CHECK(args.leaving.size() >= count, "select: leaving has room for all that may leave");
    list.push_back({.score = select.score.data(),
                    .index = select.index.data(),
                    .eligible = select.eligible.data(),
                    .leaving = args.leaving.data(),
                    .left = args.left,
                    .first_scratch = scratch,
                    .scratch = static_cast<uint32_t>(std::bit_ceil(count)),
                    .tokens = static_cast<uint32_t>(select.score.size()),
                    .count = static_cast<uint32_t>(count)});
    scratch += list.back().scratch;
  }
  EBBTIDE_ASSIGN_OR_RETURN(const Lane* there, stream.Upload(std::span<const Lane>(list)));
  EBBTIDE_ASSIGN_OR_RETURN(uint64_t * keys, stream.Scratch<uint64_t>(scratch));
  EBBTIDE_ASSIGN_OR_RETURN(int32_t * tokens, stream.Scratch<int32_t>(scratch));
  return Launch(stream,
                {.operation = "select", .grid = GridOf(list.size(), 1), .threads = kThreads},
                &SelectLowest, there, keys, tokens);
}

}  // namespace ebbtide::gpu
