// SPDX-License-Identifier: Apache-2.0

#include "bench/micro/gpu/measure.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>

#include "benchmark/benchmark.h"

#include "gpu/cpu/simd_targets.h"
#include "gpu/element.h"

namespace ebbtide::bench {
namespace {

// What the pool holds: 0 for a pattern that is not one of a dtype.
gpu::Dtype filled = gpu::Dtype{};

}  // namespace

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

void FillPool(std::span<const std::byte> pattern) {
  filled = gpu::Dtype{};
  for (size_t byte = 0; byte < kPoolBytes; byte += pattern.size()) {
    std::memcpy(Pool().data() + byte, pattern.data(), std::min(pattern.size(), kPoolBytes - byte));
  }
}

void FillPool(gpu::Dtype dtype) {
  if (filled == dtype) return;
  std::mt19937_64 random(kSeed);
  std::normal_distribution<float> normal;
  std::vector<std::byte> pattern(size_t{1} << 20);
  for (size_t byte = 0; byte < pattern.size(); byte += gpu::DtypeBytes(dtype)) {
    gpu::StoreElement(dtype, &pattern[byte], 0, normal(random));
  }
  FillPool(pattern);
  filled = dtype;
}

double ThreadSeconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

int RunBenchmarks(int argc, char** argv, void (*register_cases)()) {
  if (const char* target = std::getenv("EBBTIDE_SIMD"); target != nullptr) {
    const absl::Status status = gpu::ForceSimdTarget(target);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
      return 1;
    }
  }
  benchmark::AddCustomContext("simd", std::string(gpu::ChosenSimdTarget()));
  register_cases();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}

}  // namespace ebbtide::bench
