// SPDX-License-Identifier: Apache-2.0
//
// What benchmarks of kernels share: a pool far larger than the caches, this thread's own time, and
// a main that can force a SIMD target.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gpu/shape.h"

namespace ebbtide::bench {

inline constexpr size_t kPoolBytes = size_t{1} << 29;
inline constexpr uint64_t kSeed = 20261130;

// One allocation, as the daemon's pool is: 2 MiB pages where the kernel gives them.
std::span<std::byte> Pool();

// Fills the pool with `pattern`, repeated.
void FillPool(std::span<const std::byte> pattern);

// Fills the pool with elements ~ N(0, 1), the first MiB repeated; nothing to do the second time.
void FillPool(gpu::Dtype dtype);

// CPU time of this thread: a busy machine blurs it little.
double ThreadSeconds();

double Median(std::vector<double> values);

// Runs what `register_cases` registers, on the SIMD target that EBBTIDE_SIMD names.
int RunBenchmarks(int argc, char** argv, void (*register_cases)());

}  // namespace ebbtide::bench
