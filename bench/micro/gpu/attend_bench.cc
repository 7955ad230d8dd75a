// SPDX-License-Identifier: Apache-2.0
//
// Does attend read keys and values as fast as this machine reads memory? Yes at group 1 if `ratio`
// is 0.8 or more (docs/architecture.md, speed). Each iteration reads as many bytes in order as the
// attend that follows, on the same threads, and the ratio is the median over iterations; times are
// the threads' own CPU times, so a busy machine blurs it little.
//
// What attention over each frame alone costs on top, and from it the damage of losing each: `parts`
// and `damage` are times over that of attend without (the aim for pages: 0.1 more in all).
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
#include "gpu/kernels/page_damage.h"

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
  bool with_parts = false;  // Each frame alone too.
};

struct Answer {
  std::vector<float> output, lse, part_output, part_lse, damage;
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
  AttendArgs Args(int lane, Answer& answer) const {
    static const int32_t kLastToken = kTokens;
    answer.output.resize(query_.size());
    answer.lse.resize(static_cast<size_t>(shape_.group));
    answer.part_lse.resize(shape_.with_parts ? kLaneExtents * answer.lse.size() : 0);
    answer.part_output.resize(answer.part_lse.size() * static_cast<size_t>(shape_.head_dim));
    return {.dtype = shape_.dtype,
            .head_dim = shape_.head_dim,
            .group = shape_.group,
            .scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim)),
            .extents =
                std::span(extents_).subspan(static_cast<size_t>(lane) * kLaneExtents, kLaneExtents),
            .query = query_,
            .query_index = {&kLastToken, 1},
            .output = answer.output,
            .lse = answer.lse,
            .logits = {},
            .part_output = answer.part_output,
            .part_lse = answer.part_lse};
  }
  gpu::PageDamageArgs DamageArgs(Answer& answer) const {
    answer.damage.resize(kLaneExtents);
    return {.head_dim = shape_.head_dim,
            .rows = shape_.group,
            .pages = static_cast<int>(kLaneExtents),
            .part_output = answer.part_output,
            .part_lse = answer.part_lse,
            .output = answer.output,
            .lse = answer.lse,
            .damage = answer.damage};
  }

 private:
  static constexpr size_t kLaneExtents = kTokens / kFrameSlots;
  Case shape_;
  std::vector<int32_t> index_;
  std::vector<Extent> extents_;
  std::vector<float> query_;
};

void CheckNear(const std::vector<float>& got, const std::vector<float>& expected) {
  for (size_t i = 0; i < got.size(); ++i) {
    if (!(std::fabs(got[i] - expected[i]) <= 2e-6F * std::max(1.0F, std::fabs(expected[i])))) {
      std::fprintf(stderr, "attend disagrees with its reference: %g for %g\n",
                   static_cast<double>(got[i]), static_cast<double>(expected[i]));
      std::exit(1);
    }
  }
}

void CheckAgainstReference(const Lanes& lanes) {
  Answer answer, expected;
  AttendCpu(lanes.Args(0, answer));
  AttendReference(lanes.Args(0, expected));
  CheckNear(answer.output, expected.output);
  CheckNear(answer.part_output, expected.part_output);
  if (answer.part_lse.empty()) return;
  PageDamageCpu(lanes.DamageArgs(answer));
  PageDamageReference(lanes.DamageArgs(expected));
  CheckNear(answer.damage, expected.damage);
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
      thread_local Answer answer;
      AttendCpu(lanes.Args(i, answer));
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

// What pages cost on top of attend: the same lanes without their parts, with them, and the damage
// of losing each, in turns.
void BM_Pages(benchmark::State& state, const Case& shape) {
  Case plain_shape = shape;
  plain_shape.with_parts = false;
  const Lanes plain(plain_shape);
  const Lanes lanes(shape);
  CheckAgainstReference(lanes);
  std::vector<double> parts_ratios, damage_ratios;
  Answer plain_answer, answer;
  for (auto _ : state) {
    double plain_time = 0, parts_time = 0, damage_time = 0;
    for (int lane = 0; lane < lanes.count(); ++lane) {
      const double start = ThreadSeconds();
      AttendCpu(plain.Args(lane, plain_answer));
      const double attended = ThreadSeconds();
      AttendCpu(lanes.Args((lane + lanes.count() / 2) % lanes.count(), answer));
      const double parted = ThreadSeconds();
      PageDamageCpu(lanes.DamageArgs(answer));
      damage_time += ThreadSeconds() - parted;
      parts_time += parted - attended;
      plain_time += attended - start;
    }
    parts_ratios.push_back(parts_time / plain_time);
    damage_ratios.push_back(damage_time / plain_time);
    state.SetIterationTime(parts_time / lanes.count());
  }
  state.counters["parts"] = Median(parts_ratios);
  state.counters["damage"] = Median(damage_ratios);
}

void RegisterCases() {
  for (const int head_dim : {64, 128}) {
    for (const int group : {1, 4, 8}) {
      const Case shape{.head_dim = head_dim, .group = group, .with_parts = true};
      const std::string name =
          "pages/f16/d" + std::to_string(head_dim) + "/g" + std::to_string(group);
      benchmark::RegisterBenchmark(name.c_str(), BM_Pages, shape)
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond)
          ->Iterations(11);
    }
  }

  for (const int threads : {1, 2}) {
    for (const Dtype dtype : gpu::kDtypes) {
      for (const int head_dim : {64, 128}) {
        for (const Frames frames : {Frames::kContiguous, Frames::kRandom, Frames::kHoles}) {
          for (const int group : {1, 4, 8}) {
            const Case shape{dtype, head_dim, group, frames, threads, false};
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
