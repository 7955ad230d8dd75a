// SPDX-License-Identifier: Apache-2.0
//
// How one attend is cut into parts that may run at the same time, and put together again. Where the
// cuts are depends on the call alone, and parts are merged in list order, so the bits of the answer
// do not depend on how many threads there are.

#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "gpu/kernels/attend.h"

namespace ebbtide::gpu {

// A block of rows over a run of extents. Both limits are part of what makes answers repeat:
// changing one changes last bits.
inline constexpr size_t kAttendBlockRows = 64;  // Their queries and sums stay in the L2 cache.
inline constexpr size_t kAttendRunSlots =
    1024;  // 25 to 100 us of work; what a run's f32 sums add up.

struct AttendPart {
  size_t first_row = 0;
  size_t rows = 0;
  size_t first_extent = 0;
  size_t extents = 0;
  size_t first_slot = 0;  // Column of the first extent in a row of logits.
  size_t slots = 0;
};

// Output and log-sum-exp of a part's rows; lse in f64, for it is rounded once, at the end.
struct AttendPartial {
  std::vector<float> output;  // [rows, head_dim]
  std::vector<double> lse;    // [rows]
};

// Parts of one call: blocks of rows in order, and for each all its runs in list order, at least
// one.
std::vector<AttendPart> SplitAttend(const AttendArgs& args);

// Of `parts`, which are not empty, those of the first block of rows.
std::span<const AttendPart> FirstBlock(std::span<const AttendPart> parts);

// Attends all runs of one block of rows, one after the other, and writes its answer.
void AttendBlock(const AttendArgs& args, std::span<const AttendPart> runs);

// Attends one part; writes its piece of args.logits where those are wanted. (kernels/attend_cpu.cc)
void AttendPartCpu(const AttendArgs& args, const AttendPart& part, AttendPartial& partial);

// into := into and part together.
void MergePartial(AttendPartial& into, const AttendPartial& part);

// Writes the merged partial of all runs of part's rows into args.output and args.lse.
void StorePartial(const AttendArgs& args, const AttendPart& part, const AttendPartial& partial);

}  // namespace ebbtide::gpu
