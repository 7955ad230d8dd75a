// SPDX-License-Identifier: Apache-2.0
//
// Does attend read keys and values as fast as this machine reads memory? Yes at group 1 if `ratio`
// is 0.8 or more (docs/architecture.md, speed). Each iteration reads as many bytes in order as the
// attend that follows, on the same threads, and the ratio is the median over iterations; times are
// the threads' own CPU times, so a busy machine blurs it little.
//
// Lanes of 16k tokens fill a pool far larger than the caches. Results are checked against the
// reference before the first measurement.

#include "gpu/kernels/attend.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "benchmark/benchmark.h"

#include "bench/micro/gpu/streaming_read.h"
#include "gpu/cpu/simd_targets.h"
#include "gpu/element.h"

namespace ebbtide::bench {
namespace {

using gpu::AttendArgs;
using gpu::Dtype;
using gpu::Extent;

constexpr size_t kPoolBytes = size_t{1} << 29;
constexpr int kTokens = 16384;
constexpr int kFrameSlots = 32;
constexpr uint64_t kSeed = 20261130;

struct Case {
  Dtype dtype = Dtype::kF16;
  int head_dim = 128;
  int group = 1;
  bool is_random = false;  // Frames of a lane lie anywhere, not side by side.
  int threads = 1;
};

// One allocation, as the daemon's pool is: 2 MiB pages where the kernel gives them.
std::span<std::byte> Pool() {
  static const std::span<std::byte> pool = [] {
    constexpr size_t kHugePage = size_t{2} << 20;
    void* memory = mmap(nullptr, kPoolBytes + kHugePage, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    const size_t address = (reinterpret_cast<size_t>(memory) + kHugePage - 1) & ~(kHugePage - 1);
    madvise(reinterpret_cast<void*>(address), kPoolBytes, MADV_HUGEPAGE);
    return std::span(reinterpret_cast<std::byte*>(address), kPoolBytes);
  }();
  return pool;
}

// Keys and values ~ N(0, 1) of the case's dtype, the first MiB repeated.
void Fill(Dtype dtype) {
  static Dtype filled = Dtype{};
  if (filled == dtype) return;
  filled = dtype;
  std::mt19937_64 random(kSeed);
  std::normal_distribution<float> normal;
  constexpr size_t kPattern = size_t{1} << 20;
  for (size_t byte = 0; byte < kPattern; byte += gpu::DtypeBytes(dtype)) {
    const float element = normal(random);
    const uint16_t half = gpu::FloatToHalf(element);
    const void* source = dtype == Dtype::kF32 ? static_cast<const void*>(&element) : &half;
    std::memcpy(Pool().data() + byte, source, gpu::DtypeBytes(dtype));
  }
  for (size_t byte = kPattern; byte < kPoolBytes; byte += kPattern) {
    std::memcpy(Pool().data() + byte, Pool().data(), kPattern);
  }
}

// The pool cut into frames and those dealt to lanes.
class Lanes {
 public:
  explicit Lanes(const Case& shape) : shape_(shape), index_(kTokens) {
    Fill(shape.dtype);
    const size_t half = static_cast<size_t>(kFrameSlots * shape.head_dim) * DtypeBytes(shape.dtype);
    std::vector<size_t> frame(kPoolBytes / (2 * half));
    std::iota(frame.begin(), frame.end(), size_t{0});
    if (shape.is_random) std::shuffle(frame.begin(), frame.end(), std::mt19937_64(kSeed));
    std::iota(index_.begin(), index_.end(), 0);
    for (size_t i = 0; i < frame.size(); ++i) {
      const std::byte* key = Pool().data() + frame[i] * 2 * half;
      const size_t first = i * kFrameSlots % kTokens;
      extents_.push_back({key, key + half, &index_[first], kFrameSlots});
    }
    std::mt19937_64 random(kSeed);
    std::normal_distribution<float> normal;
    query_.resize(static_cast<size_t>(shape.group * shape.head_dim));
    for (float& element : query_) element = normal(random);
  }

  int count() const { return static_cast<int>(extents_.size() / kLaneExtents); }
  size_t lane_bytes() const {
    return 2 * DtypeBytes(shape_.dtype) * static_cast<size_t>(shape_.head_dim) * kTokens;
  }
  AttendArgs Args(int lane, std::vector<float>& output, std::vector<float>& lse) const {
    static const int32_t kLastToken = kTokens;
    output.resize(query_.size());
    lse.resize(static_cast<size_t>(shape_.group));
    return {.dtype = shape_.dtype,
            .head_dim = shape_.head_dim,
            .group = shape_.group,
            .scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim)),
            .extents =
                std::span(extents_).subspan(static_cast<size_t>(lane) * kLaneExtents, kLaneExtents),
            .query = query_,
            .query_index = {&kLastToken, 1},
            .output = output,
            .lse = lse,
            .logits = {}};
  }

 private:
  static constexpr size_t kLaneExtents = kTokens / kFrameSlots;
  Case shape_;
  std::vector<int32_t> index_;
  std::vector<Extent> extents_;
  std::vector<float> query_;
};

void CheckAgainstReference(const Lanes& lanes) {
  std::vector<float> output, expected, lse, expected_lse;
  AttendCpu(lanes.Args(0, output, lse));
  AttendReference(lanes.Args(0, expected, expected_lse));
  for (size_t i = 0; i < output.size(); ++i) {
    if (!(std::fabs(output[i] - expected[i]) <= 2e-6F)) {
      std::fprintf(stderr, "attend disagrees with its reference: %g for %g\n",
                   static_cast<double>(output[i]), static_cast<double>(expected[i]));
      std::exit(1);
    }
  }
}

double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Bytes per second over all threads, each reading `lanes_each` lanes from `first_lane` on.
template <class Read>
double Rate(const Case& shape, const Lanes& lanes, int first_lane, int lanes_each, Read read) {
  std::vector<double> rate(static_cast<size_t>(shape.threads));
  const auto work = [&](int thread) {
    const double start = ThreadSeconds();
    for (int i = 0; i < lanes_each; ++i) {
      read((first_lane + thread * lanes_each + i) % lanes.count());
    }
    rate[static_cast<size_t>(thread)] = static_cast<double>(lanes_each) *
                                        static_cast<double>(lanes.lane_bytes()) /
                                        (ThreadSeconds() - start);
  };
  {
    std::vector<std::jthread> others;
    for (int thread = 1; thread < shape.threads; ++thread) others.emplace_back(work, thread);
    work(0);
  }
  return std::accumulate(rate.begin(), rate.end(), 0.0);
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void BM_Attend(benchmark::State& state, const Case& shape) {
  const Lanes lanes(shape);
  CheckAgainstReference(lanes);
  const int lanes_each =
      static_cast<int>(std::max<size_t>(1, (size_t{32} << 20) / lanes.lane_bytes()));
  std::vector<double> attend_rates, read_rates, ratios;
  int lane = 0;
  for (auto _ : state) {
    const double read_rate = Rate(shape, lanes, lane, lanes_each, [&](int i) {
      benchmark::DoNotOptimize(StreamingRead(
          Pool().subspan(static_cast<size_t>(i) * lanes.lane_bytes(), lanes.lane_bytes())));
    });
    lane = (lane + shape.threads * lanes_each) % lanes.count();
    const double attend_rate = Rate(shape, lanes, lane, lanes_each, [&](int i) {
      thread_local std::vector<float> output, lse;
      AttendCpu(lanes.Args(i, output, lse));
    });
    lane = (lane + shape.threads * lanes_each) % lanes.count();
    attend_rates.push_back(attend_rate);
    read_rates.push_back(read_rate);
    ratios.push_back(attend_rate / read_rate);
    state.SetIterationTime(static_cast<double>(lanes.lane_bytes()) / attend_rate);
  }
  state.counters["GB/s"] = Median(attend_rates) / 1e9;
  state.counters["read"] = Median(read_rates) / 1e9;
  state.counters["ratio"] = Median(ratios);
}

void RegisterCases() {
  for (const int threads : {1, 2}) {
    for (const Dtype dtype : {Dtype::kF16, Dtype::kF32}) {
      for (const int head_dim : {64, 128}) {
        for (const bool is_random : {false, true}) {
          for (const int group : {1, 4, 8}) {
            const Case shape{dtype, head_dim, group, is_random, threads};
            const std::string name = std::string("attend/") + std::string(DtypeName(dtype)) + "/d" +
                                     std::to_string(head_dim) + "/g" + std::to_string(group) +
                                     (is_random ? "/random" : "/contiguous") + "/threads" +
                                     std::to_string(threads);
            benchmark::RegisterBenchmark(name.c_str(), BM_Attend, shape)
                ->UseManualTime()
                ->Unit(benchmark::kMicrosecond)
                ->Iterations(31);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ebbtide::bench

int main(int argc, char** argv) {
  if (const char* target = std::getenv("EBBTIDE_SIMD"); target != nullptr) {
    const absl::Status status = ebbtide::gpu::ForceSimdTarget(target);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
      return 1;
    }
  }
  benchmark::AddCustomContext("simd", std::string(ebbtide::gpu::ChosenSimdTarget()));
  ebbtide::bench::RegisterCases();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
