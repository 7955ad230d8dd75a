// SPDX-License-Identifier: Apache-2.0
//
// Do scores, digests and bounds keep up with memory? Yes for one row if `ratio` is 0.7 or more:
// rows of weights or queries cost arithmetic, and where they do, the ratio says how much. Each
// iteration reads as many bytes in order as the kernel that follows is bound to read, on the same
// thread; the ratio is the median over iterations, in the thread's own CPU time.
//
// Everything lies in a pool far larger than the caches. Results are checked against the reference
// before the first measurement.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"

#include "bench/micro/gpu/measure.h"
#include "bench/micro/gpu/streaming_read.h"
#include "gpu/kernels/attend.h"
#include "gpu/kernels/bound.h"
#include "gpu/kernels/damage.h"
#include "gpu/kernels/digest.h"
#include "gpu/kernels/geometry.h"
#include "gpu/kernels/mass.h"
#include "gpu/kernels/window.h"

namespace ebbtide::bench {
namespace {

using gpu::Dtype;
using gpu::Extent;

constexpr int kTokens = 16384;
constexpr int kPageTokens = 32;
constexpr int kPages = 8192;

struct Case {
  Dtype dtype = Dtype::kF16;
  int head_dim = 128;
  int rows = 1;
  bool has_dominant = false;  // Each row has a token that holds most of its weight.
};

void ExpectNear(const char* what, std::span<const float> actual, std::span<const float> expected,
                double relative, double absolute) {
  for (size_t i = 0; i < actual.size(); ++i) {
    const double error = std::fabs(static_cast<double>(actual[i]) - expected[i]);
    if (error <= relative * std::fabs(expected[i]) + absolute) continue;
    std::fprintf(stderr, "%s disagrees with its reference: %g for %g\n", what,
                 static_cast<double>(actual[i]), static_cast<double>(expected[i]));
    std::exit(1);
  }
}

// Times `work(i)` for i = 0, 1, … of `count`, each reading `bytes`, against as many bytes in order.
void Measure(benchmark::State& state, int count, size_t bytes,
             const std::function<void(int)>& work) {
  std::vector<double> rates, reads, ratios;
  const int each = static_cast<int>(std::max<size_t>(1, (size_t{16} << 20) / bytes));
  const auto rate = [&](double start) {
    return static_cast<double>(each) * static_cast<double>(bytes) / (ThreadSeconds() - start);
  };
  int next = 0;
  size_t next_byte = 0;
  for (auto _ : state) {
    double start = ThreadSeconds();
    for (int i = 0; i < each; ++i) {
      next_byte = next_byte + 2 * bytes > kPoolBytes ? 0 : next_byte + bytes;
      benchmark::DoNotOptimize(StreamingRead(Pool().subspan(next_byte, bytes)));
    }
    reads.push_back(rate(start));
    start = ThreadSeconds();
    for (int i = 0; i < each; ++i) {
      work(next);
      next = (next + 1) % count;
    }
    rates.push_back(rate(start));
    ratios.push_back(rates.back() / reads.back());
    state.SetIterationTime(static_cast<double>(bytes) / rates.back());
  }
  state.counters["GB/s"] = Median(rates) / 1e9;
  state.counters["read"] = Median(reads) / 1e9;
  state.counters["ratio"] = Median(ratios);
}

// The pool cut into frames of keys and values, dealt to lanes.
class Lanes {
 public:
  explicit Lanes(const Case& shape) : shape_(shape), index_(kTokens) {
    FillPool(shape.dtype);
    std::iota(index_.begin(), index_.end(), 0);
    const size_t half = half_bytes();
    for (size_t i = 0; i < kPoolBytes / (2 * half); ++i) {
      const std::byte* key = Pool().data() + i * 2 * half;
      extents_.push_back({key, key + half, &index_[i * kPageTokens % kTokens], kPageTokens});
    }
    std::mt19937_64 random(kSeed);
    std::normal_distribution<float> normal;
    for (int i = 0; i < shape.rows * kTokens; ++i) {
      logits_.push_back(shape.has_dominant && i % kTokens == 3 ? 20.0F : normal(random));
    }
    for (int i = 0; i < shape.rows * shape.head_dim; ++i) centre_.push_back(0.01F * normal(random));
    for (size_t r = 0; r < static_cast<size_t>(shape.rows); ++r) {
      double total = 0;
      for (size_t s = 0; s < kTokens; ++s) {
        total += std::exp(static_cast<double>(logits_[r * kTokens + s]));
      }
      lse_.push_back(static_cast<float>(std::log(total)));
    }
    weight_.assign(static_cast<size_t>(shape.rows) * kTokens, 1.0F / kTokens);
  }

  int count() const { return static_cast<int>(extents_.size() / kLaneExtents); }
  size_t half_bytes() const {
    return static_cast<size_t>(kPageTokens * shape_.head_dim) * DtypeBytes(shape_.dtype);
  }
  size_t value_bytes() const { return kLaneExtents * half_bytes(); }
  std::span<const Extent> extents(int lane) const {
    return std::span(extents_).subspan(static_cast<size_t>(lane) * kLaneExtents, kLaneExtents);
  }

  gpu::DamageArgs Damage(int lane, std::span<float> damage) const {
    return {.dtype = shape_.dtype,
            .head_dim = shape_.head_dim,
            .rows = shape_.rows,
            .extents = extents(lane),
            .logits = logits_,
            .lse = lse_,
            .centre = centre_,
            .damage = damage};
  }
  gpu::WeightedValueArgs WeightedValue(int lane, std::span<float> output) const {
    return {.dtype = shape_.dtype,
            .head_dim = shape_.head_dim,
            .rows = shape_.rows,
            .extents = extents(lane),
            .weight = weight_,
            .output = output};
  }
  gpu::GeometryArgs Geometry(int lane, std::span<float> score) const {
    return {.dtype = shape_.dtype,
            .head_dim = shape_.head_dim,
            .extents = extents(lane),
            .score = score};
  }

 private:
  static constexpr size_t kLaneExtents = kTokens / kPageTokens;
  Case shape_;
  std::vector<int32_t> index_;
  std::vector<Extent> extents_;
  std::vector<float> logits_, lse_, centre_, weight_;
};

void BM_Damage(benchmark::State& state, const Case& shape) {
  const Lanes lanes(shape);
  std::vector<float> damage(kTokens), expected(kTokens);
  DamageCpu(lanes.Damage(0, damage));
  DamageReference(lanes.Damage(0, expected));
  ExpectNear("damage", damage, expected, 1e-5, 1e-30);
  Measure(state, lanes.count(), lanes.value_bytes(),
          [&](int lane) { DamageCpu(lanes.Damage(lane, damage)); });
}

void BM_FastDamage(benchmark::State& state, const Case& shape) {
  const Lanes lanes(shape);
  std::vector<float> damage(kTokens), expected(kTokens);
  FastDamageCpu(lanes.Damage(0, damage));
  FastDamageReference(lanes.Damage(0, expected));
  ExpectNear("fast damage", damage, expected, 1e-5, 1e-30);
  Measure(state, lanes.count(), lanes.value_bytes(),
          [&](int lane) { FastDamageCpu(lanes.Damage(lane, damage)); });
}

void BM_WeightedValue(benchmark::State& state, const Case& shape) {
  const Lanes lanes(shape);
  std::vector<float> output(static_cast<size_t>(shape.rows * shape.head_dim));
  std::vector<float> expected(output.size());
  WeightedValueCpu(lanes.WeightedValue(0, output));
  WeightedValueReference(lanes.WeightedValue(0, expected));
  ExpectNear("weighted value", output, expected, 0, 1e-7);
  Measure(state, lanes.count(), lanes.value_bytes(),
          [&](int lane) { WeightedValueCpu(lanes.WeightedValue(lane, output)); });
}

void BM_KeyDiff(benchmark::State& state, const Case& shape) {
  const Lanes lanes(shape);
  std::vector<float> score(kTokens), expected(kTokens);
  KeyDiffCpu(lanes.Geometry(0, score));
  KeyDiffReference(lanes.Geometry(0, expected));
  ExpectNear("keydiff", score, expected, 0, 2e-6);
  Measure(state, lanes.count(), 2 * lanes.value_bytes(),  // Keys are read twice.
          [&](int lane) { KeyDiffCpu(lanes.Geometry(lane, score)); });
}

// A window of `rows` / 4 queries of four heads, the lane's last tokens; and what snapkv did before
// there was a kernel for it: attend with logits, then mass.
class Window {
 public:
  Window(const Case& shape, const Lanes& lanes) : shape_(shape), lanes_(lanes) {
    std::mt19937_64 random(kSeed);
    std::normal_distribution<float> normal;
    for (int i = 0; i < shape.rows * shape.head_dim; ++i) query_.push_back(normal(random));
    for (int m = 0; m < queries(); ++m) query_index_.push_back(kTokens - queries() + m);
  }

  gpu::WindowArgs Args(int lane, std::span<float> mass) const {
    return {.dtype = shape_.dtype,
            .head_dim = shape_.head_dim,
            .group = kGroup,
            .queries = queries(),
            .scale = scale(),
            .extents = lanes_.extents(lane),
            .query = query_,
            .query_index = query_index_,
            .mass = mass};
  }
  void AttendAndMass(int lane, std::span<float> mass) const {
    std::vector<float> output(query_.size());
    std::vector<float> lse(static_cast<size_t>(shape_.rows));
    std::vector<float> logits(lse.size() * kTokens);
    std::vector<double> sum(kTokens);
    gpu::AttendCpu({.dtype = shape_.dtype,
                    .head_dim = shape_.head_dim,
                    .group = kGroup,
                    .queries = queries(),
                    .scale = scale(),
                    .extents = lanes_.extents(lane),
                    .query = query_,
                    .query_index = query_index_,
                    .output = output,
                    .lse = lse,
                    .logits = logits});
    gpu::MassCpu({.group = kGroup,
                  .queries = queries(),
                  .slots = kTokens,
                  .logits = logits,
                  .lse = lse,
                  .mass = sum});
    std::ranges::transform(sum, mass.begin(), [](double x) { return static_cast<float>(x); });
  }

 private:
  static constexpr int kGroup = 4;
  int queries() const { return shape_.rows / kGroup; }
  float scale() const { return 1 / std::sqrt(static_cast<float>(shape_.head_dim)); }
  Case shape_;
  const Lanes& lanes_;
  std::vector<float> query_;
  std::vector<int32_t> query_index_;
};

void MeasureWindow(benchmark::State& state, const Case& shape, bool is_one_kernel) {
  const Lanes lanes(shape);
  const Window window(shape, lanes);
  std::vector<float> mass(kTokens), expected(kTokens);
  const auto run = [&](int lane) {
    if (is_one_kernel) {
      WindowCpu(window.Args(lane, mass));
    } else {
      window.AttendAndMass(lane, mass);
    }
  };
  run(0);
  WindowReference(window.Args(0, expected));
  ExpectNear("window", mass, expected, 1e-5, 1e-30);
  Measure(state, lanes.count(), lanes.value_bytes(), run);
}
void BM_Window(benchmark::State& state, const Case& shape) {
  MeasureWindow(state, shape, true);
}
void BM_AttendAndMass(benchmark::State& state, const Case& shape) {
  MeasureWindow(state, shape, false);
}

// Digests of `page` i of the pool.
void BM_Digest(benchmark::State& state, const Case& shape) {
  FillPool(shape.dtype);
  const gpu::PageShape page{kPageTokens, shape.head_dim, shape.dtype};
  std::vector<std::byte> digest(gpu::DigestBytes(shape.head_dim)), expected(digest.size());
  const auto args = [&](int i, std::span<std::byte> out) {
    return gpu::DigestArgs{
        page, kPageTokens,
        Pool().subspan(static_cast<size_t>(i) * page.page_bytes(), page.page_bytes()), out};
  };
  gpu::DigestCpu(args(0, digest));
  gpu::DigestReference(args(0, expected));
  const auto& tail = gpu::DigestView(digest.data(), shape.head_dim).tail;
  const auto& expected_tail = gpu::DigestView(expected.data(), shape.head_dim).tail;
  ExpectNear("digest", {&tail.value_radius, 3}, {&expected_tail.value_radius, 3}, 1e-3, 0);
  Measure(state, static_cast<int>(kPoolBytes / page.page_bytes()), page.page_bytes(),
          [&](int i) { gpu::DigestCpu(args(i, digest)); });
}

// The pool full of digests, those of a lane's pages side by side.
class Digests {
 public:
  explicit Digests(const Case& shape) : shape_(shape), bytes_(gpu::DigestBytes(shape.head_dim)) {
    FillPool(shape.dtype);
    const gpu::PageShape page{kPageTokens, shape.head_dim, shape.dtype};
    std::vector<std::byte> pattern(1024 * bytes_);
    for (size_t i = 0; i < 1024; ++i) {
      const size_t at = i % 32 * page.page_bytes();
      gpu::DigestCpu({page, kPageTokens, Pool().subspan(at, page.page_bytes()),
                      std::span(pattern).subspan(i * bytes_, bytes_)});
    }
    FillPool(pattern);
    std::mt19937_64 random(kSeed);
    std::normal_distribution<float> normal;
    for (int i = 0; i < shape.rows * shape.head_dim; ++i) query_.push_back(normal(random));
    absent_.assign(kPages, kPageTokens);
    low_.resize(static_cast<size_t>(shape.rows) * kPages);
    high_ = estimate_ = distance_ = low_;
  }

  int count() const { return static_cast<int>(kPoolBytes / (kPages * bytes_)); }
  std::vector<const std::byte*> Lane(int lane) const {
    std::vector<const std::byte*> digests;
    const std::byte* first = Pool().data() + static_cast<size_t>(lane) * kPages * bytes_;
    for (size_t p = 0; p < kPages; ++p) digests.push_back(first + p * bytes_);
    return digests;
  }
  gpu::BoundArgs Bound(std::span<const std::byte* const> digests) {
    return {.head_dim = shape_.head_dim,
            .rows = shape_.rows,
            .pages = kPages,
            .scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim)),
            .query = query_,
            .digest = digests,
            .absent = absent_,
            .mass_low = low_,
            .mass_high = high_,
            .mass_estimate = estimate_};
  }
  gpu::ValueDistanceArgs Distance(std::span<const std::byte* const> digests) {
    return {shape_.head_dim, shape_.rows, kPages, query_, digests, distance_};
  }
  std::span<const float> high() const { return high_; }
  std::span<const float> distance() const { return distance_; }

 private:
  Case shape_;
  size_t bytes_;
  std::vector<float> query_, low_, high_, estimate_, distance_;
  std::vector<int32_t> absent_;
};

void BM_Bound(benchmark::State& state, const Case& shape) {
  Digests digests(shape);
  std::vector<std::vector<const std::byte*>> lane;
  for (int i = 0; i < digests.count(); ++i) lane.push_back(digests.Lane(i));
  BoundReference(digests.Bound(lane[0]));
  const std::vector<float> expected(digests.high().begin(), digests.high().end());
  BoundCpu(digests.Bound(lane[0]));
  ExpectNear("bound", digests.high(), expected, 1e-4, 0);
  const auto dim = static_cast<size_t>(shape.head_dim);
  const size_t read = kPages * (3 * 2 * dim + sizeof(gpu::DigestTail));  // All but the value mean.
  Measure(state, digests.count(), read,
          [&](int i) { BoundCpu(digests.Bound(lane[static_cast<size_t>(i)])); });
}

void BM_ValueDistance(benchmark::State& state, const Case& shape) {
  Digests digests(shape);
  std::vector<std::vector<const std::byte*>> lane;
  for (int i = 0; i < digests.count(); ++i) lane.push_back(digests.Lane(i));
  ValueDistanceReference(digests.Distance(lane[0]));
  const std::vector<float> expected(digests.distance().begin(), digests.distance().end());
  ValueDistanceCpu(digests.Distance(lane[0]));
  ExpectNear("value distance", digests.distance(), expected, 1e-5, 0);
  const auto dim = static_cast<size_t>(shape.head_dim);
  Measure(state, digests.count(), kPages * (2 * dim + sizeof(gpu::DigestTail)),
          [&](int i) { ValueDistanceCpu(digests.Distance(lane[static_cast<size_t>(i)])); });
}

void Register(const std::string& name, void (*run)(benchmark::State&, const Case&),
              const Case& shape) {
  const std::string full = name + "/" + std::string(DtypeName(shape.dtype)) + "/d" +
                           std::to_string(shape.head_dim) + "/rows" + std::to_string(shape.rows) +
                           (shape.has_dominant ? "/dominant" : "");
  benchmark::RegisterBenchmark(full.c_str(), run, shape)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond)
      ->Iterations(31);
}

void RegisterCases() {
  for (const int head_dim : {64, 128}) {
    for (const int rows : {1, 4, 8}) {
      for (const Dtype dtype : gpu::kDtypes) {
        const Case shape{dtype, head_dim, rows};
        Register("damage", BM_Damage, shape);
        Register("damage", BM_Damage, {dtype, head_dim, rows, /*has_dominant=*/true});
        if (rows == 1) {
          Register("fast_damage", BM_FastDamage, shape);
          Register("weighted_value", BM_WeightedValue, shape);
          Register("keydiff", BM_KeyDiff, shape);
          Register("digest", BM_Digest, shape);
        }
      }
      Register("bound", BM_Bound, {Dtype::kF16, head_dim, rows});
      Register("value_distance", BM_ValueDistance, {Dtype::kF16, head_dim, rows});
    }
    for (const int rows : {32, 128}) {
      for (const Dtype dtype : gpu::kDtypes) {
        Register("window", BM_Window, {dtype, head_dim, rows});
        Register("attend_and_mass", BM_AttendAndMass, {dtype, head_dim, rows});
      }
    }
  }
}

}  // namespace
}  // namespace ebbtide::bench

int main(int argc, char** argv) {
  return ebbtide::bench::RunBenchmarks(argc, argv, ebbtide::bench::RegisterCases);
}
