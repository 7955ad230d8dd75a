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

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "benchmark/benchmark.h"

#include "bench/micro/gpu/measure.h"
#include "bench/micro/gpu/streaming_read.h"

namespace ebbtide::bench {
namespace {

using gpu::AttendArgs;
using gpu::Dtype;
using gpu::Extent;

constexpr int kTokens = 16384;
constexpr int kFrameSlots = 32;

enum class Frames {
  kContiguous,
  kRandom,  // Frames of a lane lie anywhere, not side by side.
  kHoles,   // Side by side; every eighth slot has no token, and counts all the same.
};
constexpr const char* kFramesNames[] = {"contiguous", "random", "holes"};

struct Case {
  Dtype dtype = Dtype::kF16;
  int head_dim = 128;
  int group = 1;
  Frames frames = Frames::kContiguous;
  int threads = 1;
};

// The pool cut into frames and those dealt to lanes.
class Lanes {
 public:
  explicit Lanes(const Case& shape) : shape_(shape), index_(kTokens) {
    FillPool(shape.dtype);
    const size_t half = static_cast<size_t>(kFrameSlots * shape.head_dim) * DtypeBytes(shape.dtype);
    std::vector<size_t> frame(kPoolBytes / (2 * half));
    std::iota(frame.begin(), frame.end(), size_t{0});
    if (shape.frames == Frames::kRandom)
      std::shuffle(frame.begin(), frame.end(), std::mt19937_64(kSeed));
    std::iota(index_.begin(), index_.end(), 0);
    for (size_t i = 0; shape.frames == Frames::kHoles && i < index_.size(); i += 8) {
      index_[i] = gpu::kNoToken;
    }
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
    if (!(std::fabs(output[i] - expected[i]) <= 2e-6F * std::max(1.0F, std::fabs(expected[i])))) {
      std::fprintf(stderr, "attend disagrees with its reference: %g for %g\n",
                   static_cast<double>(output[i]), static_cast<double>(expected[i]));
      std::exit(1);
    }
  }
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
    for (const Dtype dtype : gpu::kDtypes) {
      for (const int head_dim : {64, 128}) {
        for (const Frames frames : {Frames::kContiguous, Frames::kRandom, Frames::kHoles}) {
          for (const int group : {1, 4, 8}) {
            const Case shape{dtype, head_dim, group, frames, threads};
            const std::string name = std::string("attend/") + std::string(DtypeName(dtype)) + "/d" +
                                     std::to_string(head_dim) + "/g" + std::to_string(group) + "/" +
                                     kFramesNames[static_cast<int>(frames)] + "/threads" +
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
  return ebbtide::bench::RunBenchmarks(argc, argv, ebbtide::bench::RegisterCases);
}
