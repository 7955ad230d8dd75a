// SPDX-License-Identifier: Apache-2.0
//
// The emulator: what CUDA promises, and that each bug planted here is found. Every kernel stands
// twice, right and with one thing missing, so that what is found is that and not the kernel. Some
// bugs only a sanitizer finds: those tests run under its preset.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "gpu/cuda/port.h"
#include "tests/cuemu/cuemu_fixture.h"
#include "tests/cuemu/device.h"

#if defined(__SANITIZE_THREAD__)
extern "C" const char* __tsan_default_options();  // NOLINT(bugprone-reserved-identifier): TSan's.
extern "C" const char* __tsan_default_options() {
  return "halt_on_error=1";
}
constexpr bool kHasTsan = true;
#else
constexpr bool kHasTsan = false;
#endif
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kHasAsan = true;
#else
constexpr bool kHasAsan = false;
#endif
#if defined(CUEMU_UBSAN)
constexpr bool kHasUbsan = true;
#else
constexpr bool kHasUbsan = false;
#endif

namespace ebbtide::gpu {
namespace {

constexpr int kThreads = 128;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;

// --- What CUDA promises ---

__global__ void WriteCoordinates(int* seen) {
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  atomicAdd(&seen[block * blockDim.x * blockDim.y * blockDim.z + thread], 1);
}

TEST_F(CuemuTest, EachThreadOfEachBlockRunsOnceInAnyOrder) {
  for (const uint32_t seed : {0U, 1U, 2U}) {
    cuemu::SetSeed(seed);
    std::vector<int> seen(2 * 3 * 4 * 5 * 6 * 2, 0);

    ASSERT_EQ(Enqueue(&WriteCoordinates, dim3(2, 3, 4), dim3(5, 6, 2), stream_, seen.data()),
              cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);

    EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
  }
}

__global__ void RecordOrder(int* order, int* next) {
  if (threadIdx.x == 0) order[atomicAdd(next, 1)] = static_cast<int>(blockIdx.x);
}

TEST_F(CuemuTest, SeedDrawsTheOrderOfBlocks) {
  std::vector<int> in_order(40);
  std::vector<int> shuffled(40);
  int next = 0;
  Run(&RecordOrder, 40, 1, in_order.data(), &next);
  next = 0;
  cuemu::SetSeed(7);
  Run(&RecordOrder, 40, 1, shuffled.data(), &next);

  EXPECT_TRUE(std::is_sorted(in_order.begin(), in_order.end()));
  EXPECT_FALSE(std::is_sorted(shuffled.begin(), shuffled.end()));
  EXPECT_TRUE(std::is_permutation(in_order.begin(), in_order.end(), shuffled.begin()));
}

struct Answers {
  int broadcast, segment, exclusive_or, up, down, count, any, all, voted;
  unsigned ballot;
};

__global__ void AskWarp(Answers* answers) {
  const int t = static_cast<int>(threadIdx.x);
  Answers& mine = answers[t];
  mine.broadcast = __shfl_sync(kAllLanes, t, 5);
  mine.segment = __shfl_sync(kAllLanes, t, 9, 8);
  mine.exclusive_or = __shfl_xor_sync(kAllLanes, t, 3);
  mine.up = __shfl_up_sync(kAllLanes, t, 2, 16);
  mine.down = __shfl_down_sync(kAllLanes, t, 2, 16);
  mine.ballot = __ballot_sync(kAllLanes, t % 3 == 0);
  mine.any = __any_sync(kAllLanes, t % 32 == 31);
  mine.all = __all_sync(kAllLanes, t % 32 != 31);
  mine.count = __syncthreads_count(t % 5 == 0);
  mine.voted = __syncthreads_or(t == 64);
}

TEST_F(CuemuTest, CollectivesAnswerAsCudaDefinesThem) {
  std::vector<Answers> answers(64);

  Run(&AskWarp, 1, 64, answers.data());

  for (int t = 0; t < 64; ++t) {
    const Answers& mine = answers[static_cast<size_t>(t)];
    const int warp = t / 32 * 32;
    EXPECT_EQ(mine.broadcast, warp + 5) << t;
    EXPECT_EQ(mine.segment, t / 8 * 8 + 1) << t;
    EXPECT_EQ(mine.exclusive_or, t ^ 3) << t;
    EXPECT_EQ(mine.up, t % 16 < 2 ? t : t - 2) << t;
    EXPECT_EQ(mine.down, t % 16 >= 14 ? t : t + 2) << t;
    EXPECT_EQ(mine.ballot, t < 32 ? 0x49249249U : 0x92492492U) << t;
    EXPECT_EQ(mine.any, 1) << t;
    EXPECT_EQ(mine.all, 0) << t;
    EXPECT_EQ(mine.count, 13) << t;
    EXPECT_EQ(mine.voted, 0) << t;
  }
}

__global__ void SumOfSomeLanes(int* sums) {
  const int t = static_cast<int>(threadIdx.x);
  if (t % 2 == 0) return;  // Who has returned is not waited for.
  __syncthreads();
  sums[t] = __popc(__ballot_sync(0xAAAAAAAAU, 1));
}

TEST_F(CuemuTest, LanesThatReturnedAreNotWaitedFor) {
  std::vector<int> sums(32, 0);

  Run(&SumOfSomeLanes, 1, 32, sums.data());

  for (size_t t = 1; t < 32; t += 2) EXPECT_EQ(sums[t], 16) << t;
}

__global__ void Store(int* to, int value) {
  *to = value;
}
__global__ void Copy(int* to, const int* from) {
  *to = *from;
}

TEST_F(CuemuTest, WorkRunsOnlyOnceItIsWaitedFor) {
  int value = 0;
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);

  ASSERT_EQ(Enqueue(&Store, dim3(1), dim3(1), stream_, &value, 42), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, stream_), cudaSuccess);
  EXPECT_EQ(value, 0);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  EXPECT_EQ(value, 42);
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess);

  ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
}

// 1 where the second stream is told to wait for the first, else what was there before.
int ValueAcrossStreams(cudaStream_t first, bool waits) {
  int value = 0;
  int copied = -1;
  cudaStream_t second = nullptr;
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking), cudaSuccess);
  EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  EXPECT_EQ(Enqueue(&Store, dim3(1), dim3(1), first, &value, 1), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, first), cudaSuccess);
  if (waits) {
    EXPECT_EQ(cudaStreamWaitEvent(second, event, 0), cudaSuccess);
  }
  EXPECT_EQ(Enqueue(&Copy, dim3(1), dim3(1), second, &copied, &value), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(second), cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(first), cudaSuccess);
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(second), cudaSuccess);
  return copied;
}

TEST_F(CuemuTest, StreamThatDoesNotWaitForAnotherSeesOldMemory) {
  EXPECT_EQ(ValueAcrossStreams(stream_, true), 1);
  EXPECT_EQ(ValueAcrossStreams(stream_, false), 0);
}

TEST_F(CuemuTest, DefaultStreamIsRefused) {
  int value = 0;

  EXPECT_EQ(Enqueue(&Store, dim3(1), dim3(1), nullptr, &value, 1), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// A graph does again what its stream was given, with memory as it is by then.
TEST_F(CuemuTest, GraphRepeatsWhatItsStreamWasGiven) {
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  int from = 1;
  int to = 0;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  cudaMemcpyAsync(&to, &from, sizeof(to), cudaMemcpyHostToDevice, stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&ready, graph, 0), cudaSuccess);
  cudaStreamSynchronize(stream);
  EXPECT_EQ(to, 0);

  for (from = 5; from < 7; ++from) {
    cudaGraphLaunch(ready, stream);
    cudaStreamSynchronize(stream);
    EXPECT_EQ(to, from);
  }

  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_F(CuemuTest, WaitsAndAllocationsSpoilACapture) {
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  void* memory = nullptr;
  for (const bool waits : {true, false}) {
    cudaGraph_t graph = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
    EXPECT_EQ(waits ? cudaStreamSynchronize(stream) : cudaMalloc(&memory, 1),
              cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
  }
  cudaGetLastError();
  cudaStreamDestroy(stream);
}

TEST_F(CuemuTest, FreshMemoryHoldsNoNumbers) {
  float* memory = nullptr;
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&memory), sizeof(float)), cudaSuccess);

  EXPECT_TRUE(std::isnan(*memory));

  EXPECT_EQ(cudaFree(memory), cudaSuccess);
}

TEST_F(CuemuTest, HiddenMemoryIsForWorkOfAStreamAlone) {
  cuemu::SetDevice({.hides_memory = true});
  int* memory = nullptr;
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&memory), 64 * sizeof(int)), cudaSuccess);
  int value = 0;

  Run(&Store, 1, 1, memory + 63, 7);
  cudaMemcpyAsync(&value, memory + 63, sizeof(int), cudaMemcpyDeviceToHost, stream_);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(value, 7);
  EXPECT_DEATH(memory[0] = 1, "");
  EXPECT_DEATH(Run(&Store, 1, 1, memory + 64, 7), "") << "behind its end there is nothing";

  EXPECT_EQ(cudaFree(memory), cudaSuccess);
  cuemu::SetDevice({});
}

TEST_F(CuemuTest, BrokenDeviceSaysSoAtEveryWait) {
  int value = 0;
  cuemu::BreakDevice();
  EXPECT_EQ(Enqueue(&Store, dim3(1), dim3(1), stream_, &value, 1), cudaErrorLaunchFailure);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorLaunchFailure);
  cuemu::HealDevice();

  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_EQ(value, 0);
}

// --- Planted bugs ---

// Each thread reads what its neighbour in another warp wrote.
template <bool kIsBroken>
__global__ void Rotate(int* out) {
  __shared__ int values[kThreads];
  const int t = static_cast<int>(threadIdx.x);
  values[t] = t;
  if (!kIsBroken) __syncthreads();
  out[t] = values[(t + 32) % kThreads];
}

TEST_F(CuemuTest, FindsAMissingBarrier) {
  std::vector<int> out(kThreads);
  Run(&Rotate<false>, 1, kThreads, out.data());
  for (int t = 0; t < kThreads; ++t) EXPECT_EQ(out[static_cast<size_t>(t)], (t + 32) % kThreads);

  if (kHasTsan) {
    EXPECT_DEATH(Run(&Rotate<true>, 1, kThreads, out.data()), "data race.*\n.*\n.*Rotate");
  } else {
    Run(&Rotate<true>, 1, kThreads, out.data());
    EXPECT_NE(out[0], 32);
  }
}

enum class Histogram { kRight, kNotAtomic, kNotClearedInTime };

template <Histogram kKind>
__global__ void CountDigits(const int* digits, int* counts) {
  __shared__ int histogram[8];
  const int t = static_cast<int>(threadIdx.x);
  if (t < 8) histogram[t] = 0;
  if (kKind != Histogram::kNotClearedInTime) __syncthreads();
  if (kKind == Histogram::kNotAtomic) {
    ++histogram[digits[t]];
  } else {
    atomicAdd(&histogram[digits[t]], 1);
  }
  __syncthreads();
  if (t < 8) counts[t] = histogram[t];
}

class CuemuRaceTest : public CuemuTest {
 protected:
  void SetUp() override {
    if (!kHasTsan) GTEST_SKIP() << "not run: only the thread sanitizer finds it (preset tsan)";
    for (int t = 0; t < kThreads; ++t) digits_.push_back(t % 8);
    counts_.resize(8);
  }

  std::vector<int> digits_;
  std::vector<int> counts_;
};

TEST_F(CuemuRaceTest, FindsAnIncrementThatIsNotAtomic) {
  Run(&CountDigits<Histogram::kRight>, 2, kThreads, digits_.data(), counts_.data());
  EXPECT_EQ(counts_, std::vector<int>(8, kThreads / 8));

  EXPECT_DEATH(
      Run(&CountDigits<Histogram::kNotAtomic>, 1, kThreads, digits_.data(), counts_.data()),
      "data race");
}

TEST_F(CuemuRaceTest, FindsAMissingBarrierAfterClearing) {
  EXPECT_DEATH(
      Run(&CountDigits<Histogram::kNotClearedInTime>, 1, kThreads, digits_.data(), counts_.data()),
      "data race");
}

template <bool kIsBroken>
__global__ void CountLastBlock(unsigned* ticket, int* answered) {
  __shared__ bool is_last;
  if (threadIdx.x == 0) is_last = atomicAdd(ticket, 1U) + 1 == gridDim.x;
  if (!kIsBroken) __syncthreads();
  if (is_last) atomicAdd(answered, 1);
}

TEST_F(CuemuRaceTest, FindsALastBlockFlagThatIsReadBeforeTheBarrier) {
  unsigned ticket = 0;
  int answered = 0;
  Run(&CountLastBlock<false>, 3, kThreads, &ticket, &answered);
  EXPECT_EQ(answered, kThreads);

  EXPECT_DEATH(Run(&CountLastBlock<true>, 3, kThreads, &ticket, &answered), "data race");
}

// Lanes of a warp exchange through shared memory: shuffles order nothing, __syncwarp does.
template <bool kIsBroken>
__global__ void ReverseWarp(int* out) {
  __shared__ int values[32];
  const int t = static_cast<int>(threadIdx.x);
  values[t] = t;
  if (kIsBroken) {
    __shfl_sync(kAllLanes, t, 0);
  } else {
    __syncwarp();
  }
  out[t] = values[31 - t];
}

TEST_F(CuemuRaceTest, FindsAMissingWarpBarrier) {
  std::vector<int> out(32);
  Run(&ReverseWarp<false>, 1, 32, out.data());
  EXPECT_EQ(out[0], 31);

  EXPECT_DEATH(Run(&ReverseWarp<true>, 1, 32, out.data()), "data race");
}

// A second barrier in a row orders nothing more.
template <bool kHasBoth>
__global__ void RotateTwoBarriers(int* out) {
  __shared__ int values[kThreads];
  const int t = static_cast<int>(threadIdx.x);
  values[t] = t;
  __syncthreads();
  if (kHasBoth) __syncthreads();
  out[t] = values[(t + 32) % kThreads];
}

TEST_F(CuemuTest, ReportsNothingWhereABarrierIsRedundant) {
  std::vector<int> out(kThreads);
  for (const uint32_t seed : {0U, 1U, 2U}) {
    cuemu::SetSeed(seed);
    Run(&RotateTwoBarriers<true>, 2, kThreads, out.data());
    Run(&RotateTwoBarriers<false>, 2, kThreads, out.data());
    EXPECT_EQ(out[0], 32);
  }
}

__global__ void CopyRows(uint4* to, const uint4* from, int rows) {
  for (int i = static_cast<int>(threadIdx.x); i < rows; i += kThreads) to[i] = from[i];
}

TEST_F(CuemuTest, FindsACopyOneRowTooFar) {
  if (!kHasAsan) GTEST_SKIP() << "not run: only the address sanitizer finds it (preset asan)";
  const std::vector<uint4> from(5);
  uint4* staging = nullptr;
  ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&staging), 4 * sizeof(uint4)), cudaSuccess);

  Run(&CopyRows, 1, kThreads, staging, from.data(), 4);
  EXPECT_DEATH(Run(&CopyRows, 1, kThreads, staging, from.data(), 5), "heap-buffer-overflow");

  EXPECT_EQ(cudaFree(staging), cudaSuccess);
}

template <int kRoom>
__global__ void FillShared(int* out) {
  __shared__ int values[kRoom];
  const int t = static_cast<int>(threadIdx.x);
  values[t] = t;
  __syncthreads();
  out[t] = values[t];
}

TEST_F(CuemuTest, FindsASharedArrayThatIsTooShort) {
  if (!kHasUbsan) GTEST_SKIP() << "not run: only the undefined behaviour sanitizer (preset asan)";
  std::vector<int> out(kThreads);

  Run(&FillShared<kThreads>, 1, kThreads, out.data());
  EXPECT_DEATH(Run(&FillShared<kThreads - 1>, 1, kThreads, out.data()), "out of bounds");
}

__global__ void LoadWide(uint4* to, const std::byte* from) {
  *to = *reinterpret_cast<const uint4*>(from);
}

TEST_F(CuemuTest, FindsAMisalignedWideLoad) {
  if (!kHasUbsan) GTEST_SKIP() << "not run: only the undefined behaviour sanitizer (preset asan)";
  alignas(16) const std::byte from[32] = {};
  uint4 to;

  Run(&LoadWide, 1, 1, &to, from);
  EXPECT_DEATH(Run(&LoadWide, 1, 1, &to, from + 8), "misaligned address");
}

__global__ void ShuffleInBranch(int* out) {
  const int t = static_cast<int>(threadIdx.x);
  out[t] = t;
  if (t < 16) out[t] = __shfl_xor_sync(kAllLanes, t, 1);
  __syncthreads();
}

TEST_F(CuemuTest, FindsAShuffleInADivergentBranch) {
  std::vector<int> out(32);

  EXPECT_DEATH(Run(&ShuffleInBranch, 1, 32, out.data()),
               "deadlock in block 0,0,0.*\n.*thread 0 waits at .*cuemu_test.cc:[0-9]+ .warp.");
}

__global__ void BarrierInBranch(int* out) {
  const int t = static_cast<int>(threadIdx.x);
  if (t < 32) {
    out[t] = t;
    __syncthreads();
  } else {
    __syncthreads();
    out[t] = t;
  }
}

TEST_F(CuemuTest, FindsABarrierInADivergentBranch) {
  std::vector<int> out(64);

  EXPECT_DEATH(Run(&BarrierInBranch, 1, 64, out.data()), "wait at different barriers");
}

__global__ void ShuffleFromOutside(int* out) {
  const int t = static_cast<int>(threadIdx.x);
  if (t < 16) out[t] = __shfl_sync(0xFFFFU, t, 16);
}
__global__ void ShuffleWithoutSelf(int* out) {
  const int t = static_cast<int>(threadIdx.x);
  out[t] = __shfl_sync(0xFFFFU, t, 0);
}
__global__ void MeetAtTwoPlaces(int* out) {
  const int t = static_cast<int>(threadIdx.x);
  if (t % 2 == 0) {
    out[t] = __shfl_sync(kAllLanes, t, 0);
  } else {
    out[t] = __shfl_sync(kAllLanes, t, 1);
  }
}

TEST_F(CuemuTest, FindsShufflesWhoseMaskIsWrong) {
  std::vector<int> out(32);

  EXPECT_DEATH(Run(&ShuffleFromOutside, 1, 32, out.data()), "reads a lane outside its mask");
  EXPECT_DEATH(Run(&ShuffleWithoutSelf, 1, 32, out.data()), "mask leaves it out");
  EXPECT_DEATH(Run(&MeetAtTwoPlaces, 1, 32, out.data()), "meet in different collectives");
}

__global__ void CheckPositive(const int* value) {
  EBBTIDE_DEVICE_CHECK(*value > 0, "value is not positive");
}

TEST_F(CuemuTest, BrokenContractOfAKernelStopsTheProcess) {
  const int one = 1;
  const int zero = 0;

  Run(&CheckPositive, 1, 1, &one);
  EXPECT_DEATH(Run(&CheckPositive, 1, 1, &zero), "value is not positive");
}

TEST_F(CuemuTest, LaunchThatNoDeviceTakesStopsTheProcess) {
  int value = 0;

  EXPECT_DEATH(Run(&Store, 1, 1025, &value, 1), "1 to 1024 threads");
  EXPECT_DEATH(Run(&Store, 0, 1, &value, 1), "no blocks");
}

}  // namespace
}  // namespace ebbtide::gpu
