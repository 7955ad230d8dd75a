// SPDX-License-Identifier: Apache-2.0
//
// What do the low-bit forms of a page cost? `ns` is the time for one page, `limit_ns` that of one
// pass over its exact bytes in turn on the same thread (a copy for what seals, a read for what
// recalls), `ratio` the second over the first. Pages of f16 lie one after the other in a pool far
// larger than the caches; forms, which recall reads soon after they were checked, in a cache.
//
// Results are checked against the reference before the first measurement.

#include "gpu/kernels/codes.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "benchmark/benchmark.h"

#include "bench/micro/gpu/measure.h"
#include "bench/micro/gpu/streaming_read.h"
#include "gpu/kernels/digest.h"

namespace ebbtide::bench {
namespace {

constexpr int kPageTokens = 32;
constexpr size_t kPatternBytes = size_t{1} << 20;  // FillPool repeats so many.
constexpr int kEach = 1024;                        // Pages in one measurement.

void Expect(bool agrees, const char* what) {
  if (agrees) return;
  std::fprintf(stderr, "%s disagrees with its reference\n", what);
  std::exit(1);
}

// Pages of the pool, the digests of its pattern, and what the pages encode to.
class Pages {
 public:
  explicit Pages(int head_dim)
      : shape_{kPageTokens, head_dim, gpu::Dtype::kF16},
        coarse_(count(), std::vector<std::byte>(gpu::CoarseBytes(shape_))),
        fine_(count(), std::vector<std::byte>(gpu::FineBytes(shape_))),
        decoded_(2 * static_cast<size_t>(kPageTokens * head_dim)) {
    FillPool(gpu::Dtype::kF16);
    for (size_t i = 0; i < count(); ++i) {
      digest_.emplace_back(gpu::DigestBytes(head_dim));
      gpu::DigestCpu({shape_, kPageTokens, page(i), digest_.back()});
      Encode(i);
    }
    CheckAgainstReference();
    std::mt19937_64 random(kSeed);
    std::normal_distribution<float> normal;
    for (int i = 0; i < 4 * head_dim; ++i) query_.push_back(normal(random));
  }

  size_t page_bytes() const { return shape_.page_bytes(); }
  std::span<const std::byte> page(size_t i) const {
    return Pool().subspan(i * page_bytes() % kPoolBytes, page_bytes());
  }

  void Encode(size_t i) {
    const size_t at = i % count();
    gpu::EncodeCpu({.shape = shape_,
                    .page = page(i),
                    .digest = digest_[at],
                    .coarse = coarse_[at],
                    .fine = fine_[at]});
  }

  void Decode(size_t i, gpu::CodeForm form) {
    gpu::DecodeCpu(Decoding(i % count(), form, decoded_));
    benchmark::DoNotOptimize(decoded_.data());
  }

  // Of four rows of queries.
  void Errors(size_t i, gpu::CodeForm form) {
    float error[4], joint[4], deviation[4], each[4];
    gpu::CodeErrorsCpu({.shape = shape_,
                        .form = form,
                        .scale = 0.125F,
                        .rows = 4,
                        .query = query_,
                        .digest = digest_[i % count()],
                        .coarse = coarse_[i % count()],
                        .logit_error = error,
                        .logit_error_joint = joint,
                        .logit_deviation = deviation,
                        .key_error = &each[0],
                        .value_error = &each[1],
                        .value_error_joint = &each[2],
                        .value_deviation = &each[3]});
    benchmark::DoNotOptimize(error);
  }

 private:
  size_t count() const { return kPatternBytes / shape_.page_bytes(); }

  gpu::DecodeArgs Decoding(size_t at, gpu::CodeForm form, std::span<float> decoded) const {
    const bool has_fine = form == gpu::CodeForm::k8Bit;
    return {.shape = shape_,
            .form = form,
            .digest = digest_[at],
            .coarse = coarse_[at],
            .fine = has_fine ? std::span(fine_[at]) : std::span<const std::byte>(),
            .page = decoded};
  }

  void CheckAgainstReference() {
    std::vector<std::byte> coarse(coarse_[0].size());
    std::vector<std::byte> fine(fine_[0].size());
    gpu::EncodeReference(
        {.shape = shape_, .page = page(0), .digest = digest_[0], .coarse = coarse, .fine = fine});
    Expect(coarse == coarse_[0] && fine == fine_[0], "encode");
    std::vector<float> decoded(decoded_.size());
    for (const auto form : {gpu::CodeForm::k4Bit, gpu::CodeForm::k8Bit}) {
      Decode(0, form);
      gpu::DecodeReference(Decoding(0, form, decoded));
      Expect(decoded == decoded_, "decode");
    }
  }

  const gpu::PageShape shape_;
  std::vector<std::vector<std::byte>> digest_, coarse_, fine_;
  std::vector<float> decoded_, query_;
};

// Times `work(i)` of pages i = 0, 1, … against `limit(i)`.
void Measure(benchmark::State& state, const std::function<void(size_t)>& work,
             const std::function<void(size_t)>& limit) {
  std::vector<double> times, limits, ratios;
  size_t next = 0;
  const auto time = [&](const std::function<void(size_t)>& each) {
    const double start = ThreadSeconds();
    for (size_t i = 0; i < kEach; ++i) each(next + i);
    return (ThreadSeconds() - start) / kEach;
  };
  for (auto _ : state) {
    limits.push_back(time(limit));
    next += kEach;
    times.push_back(time(work));
    next += kEach;
    ratios.push_back(limits.back() / times.back());
    state.SetIterationTime(times.back());
  }
  state.counters["ns"] = Median(times) * 1e9;
  state.counters["limit_ns"] = Median(limits) * 1e9;
  state.counters["ratio"] = Median(ratios);
}

void BM_Encode(benchmark::State& state) {
  Pages pages(static_cast<int>(state.range(0)));
  std::vector<std::byte> target(2 * kPatternBytes);
  Measure(
      state, [&](size_t i) { pages.Encode(i); },
      [&](size_t i) {
        const auto from = pages.page(i);
        std::memcpy(&target[i * from.size() % kPatternBytes], from.data(), from.size());
      });
}

void BM_Form(benchmark::State& state, gpu::CodeForm form,
             void (Pages::*work)(size_t, gpu::CodeForm)) {
  Pages pages(static_cast<int>(state.range(0)));
  Measure(
      state, [&](size_t i) { (pages.*work)(i, form); },
      [&](size_t i) { benchmark::DoNotOptimize(StreamingRead(pages.page(i))); });
}

void RegisterCases() {
  const auto add = [](const char* name, auto... args) {
    benchmark::RegisterBenchmark(name, args...)
        ->ArgName("d")
        ->Arg(64)
        ->Arg(128)
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond)
        ->Iterations(31);
  };
  add("encode", BM_Encode);
  add("decode4", BM_Form, gpu::CodeForm::k4Bit, &Pages::Decode);
  add("decode8", BM_Form, gpu::CodeForm::k8Bit, &Pages::Decode);
  add("errors4", BM_Form, gpu::CodeForm::k4Bit, &Pages::Errors);
}

}  // namespace
}  // namespace ebbtide::bench

int main(int argc, char** argv) {
  return ebbtide::bench::RunBenchmarks(argc, argv, ebbtide::bench::RegisterCases);
}
