// SPDX-License-Identifier: Apache-2.0
//
// Which stretches of a record to read for the pages asked for: neighbours together, each stretch
// cut to the 4 KiB that O_DIRECT goes by. Plain arithmetic.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ebbtide::storage {

struct ByteRange {
  uint64_t offset = 0;
  uint64_t bytes = 0;
  uint64_t end() const { return offset + bytes; }
};

// Bytes [begin, end) of a record hold wanted[first] … wanted[last - 1].
struct PageRun {
  uint64_t begin = 0;  // Multiples of 4096.
  uint64_t end = 0;
  size_t first = 0;
  size_t last = 0;
  friend bool operator==(const PageRun&, const PageRun&) = default;
};

// A gap is read and thrown away where that costs less than another read would: a read of 4 KiB
// takes as long as some 64 KiB at the disk's rate (O_DIRECT, virtual disk: 44 us, 1 MiB 604 us).
inline constexpr uint64_t kReadThroughBytes = uint64_t{64} << 10;
inline constexpr uint64_t kRunBytesMax = uint64_t{1} << 20;  // Longer only where one page is.

// `wanted`: places of pages or their forms in a record, by ascending offset; equals allowed.
std::vector<PageRun> PlanPageRuns(std::span<const ByteRange> wanted);

}  // namespace ebbtide::storage
