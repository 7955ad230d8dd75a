// SPDX-License-Identifier: Apache-2.0
//
// Attend over many lanes on several threads. Lanes and blocks of rows run side by side; where that
// leaves threads idle, the runs of one lane do too, and are merged in order: the bits are those of
// AttendCpu on each lane.

#pragma once

#include <span>

#include "base/executor.h"
#include "gpu/kernels/attend.h"

namespace ebbtide::gpu {

void AttendLanes(std::span<const AttendArgs> lanes, ParallelFor& threads);

}  // namespace ebbtide::gpu
