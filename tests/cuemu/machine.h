// SPDX-License-Identifier: Apache-2.0
//
// The device that cuemu.h's CUDA runs on: one block at a time, each of its threads a fiber that
// runs until it waits for others. Here is what the threads of a kernel ask of it.
//
// It stops the process, naming file and line, where threads of a block wait at different barriers,
// where lanes of one mask meet at different places, where a lane is outside its mask or reads one
// that is, and where nobody can go on.
// Tested by tests/cuemu/cuemu_test.cc.

#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>

namespace cuemu {

inline constexpr int kWarpLanes = 32;
inline constexpr int kBlockThreadsMax = 1024;
inline constexpr size_t kValueBytes = 128;  // The largest value that lanes exchange.

// Where a kernel calls: threads that meet must meet at one place. (clang 14 has no
// std::source_location.)
struct Place {
  const char* file = "";
  int line = 0;

  static constexpr Place Here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
  bool operator==(const Place&) const = default;
};

struct Coordinates {
  uint3 thread;
  uint3 block;
  dim3 block_dim;
  dim3 grid_dim;
};

// Of the thread that runs now.
const Coordinates& Here();
int Lane();

// Stops the process with what is wrong, where `place` is and which thread it is.
[[noreturn]] void Fail(const char* what, const Place& place);

// What a collective computes once every lane of `mask` is there: in[l] and out[l] are lane l's.
using Combine = void (*)(unsigned mask, const void* const* in, void* const* out);

// One meeting of lanes; `combine` runs once, for all.
struct Meeting {
  Place place;
  unsigned mask = 0;
  Combine combine = nullptr;
  bool orders_memory = false;  // As __syncwarp does, and shuffles do not.
};
void MeetWarp(const Meeting& meeting, const void* in, size_t in_bytes, void* out, size_t out_bytes);

// Returns how many threads of the block came with a predicate.
int MeetBlock(bool predicate, const Place& place);

// Runs `thread` for every thread of the grid, in the order of their numbers, or in one drawn from
// the seed. A later block sees what an earlier one wrote: missing fences between blocks are not
// found.
void RunGrid(dim3 grid, dim3 block, const std::function<void()>& thread);

// How many grids have run in this process.
uint64_t GridsRun();

// 0: in order. The environment's CUEMU_SEED is the first.
void SetSeed(uint32_t seed);

}  // namespace cuemu
