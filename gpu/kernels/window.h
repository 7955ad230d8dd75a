// SPDX-License-Identifier: Apache-2.0
//
// How much attention each token of a lane draws from an observation window, the last queries: what
// snapkv scores by. It is attend (attend.h) with logits and then mass (mass.h) over the window's
// rows, without values, which nobody asks for, and without rows of logits in memory.
// Tested by tests/unit/gpu/window_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gpu/extent.h"
#include "gpu/shape.h"

namespace ebbtide::gpu {

// One lane. Rows are ordered [group, queries]: row r = g * queries + m.
struct WindowArgs {
  Dtype dtype = Dtype::kF16;
  int head_dim = 0;
  int group = 1;                    // Query heads that share this lane.
  int queries = 1;                  // Tokens of the window.
  float scale = 0;                  // Usually 1 / sqrt(head_dim).
  std::span<const Extent> extents;  // Of at most kPageTokensMax slots each; keys alone are read.
  std::span<const float> query;     // [group, queries, head_dim]
  std::span<const int32_t> query_index;  // [queries] a query sees tokens with index <= its own
  std::span<float> mass;                 // [slots] out, slots of all extents
};

// The attention that each slot draws within `extents`, averaged over the group.
//
//   Math      z[r,s] = scale * query[r] . key[s], or -inf where r does not see s: where index[s] is
//             kNoToken or above query_index[m]
//             lse[r] = log sum_s exp(z[r,s]);  mass[s] = 1/group * sum_r exp(z[r,s] - lse[r])
//   Layout    row-major, dense; slots follow each other in the order of `extents`
//   Units     mass is in queries: all slots together have as much as there are queries that see any
//   Numerics  a mass is within WindowError of it, relatively, and within rows * 1e-37, as weights
//             below e^-87 count as 0. Products in f32, a row's sum in f64, a slot's in f32 over a
//             few rows each and f64 over those (CUDA: f32, over every 32nd row in a thread). f16
//             keys meet queries in two f16 parts on CUDA's tensor cores, bf16 keys in three of
//             their own, those dropped that are 0. Keys of slots that nobody sees are never read;
//             of those that a row does not see nothing gets into its sum
//   Repeats   bit for bit, for one build and SIMD target or GPU: neither threads, blocks nor other
//             lanes matter, and nothing is added up atomically
//   Cost      2 * rows * slots * head_dim flops. CPU: each key once per 64 rows, 4 bytes of scratch
//             a slot and row of 64. CUDA: each key twice, products twice, and again for each
//             further part of the queries
//   Order     done on return; CUDA: gpu/cuda/kernels.h
//   Source    SnapKV, arXiv:2404.14469; online softmax, arXiv:1805.02867
void WindowReference(const WindowArgs& args);
void WindowCpu(const WindowArgs& args);

// Slots over all extents.
size_t WindowSlots(const WindowArgs& args);

// Stops the process where a span or an extent disagrees with the shape.
void CheckWindow(const WindowArgs& args);

// Upper bound on the relative error of a mass, of any implementation, for |query| and max |key| in
// l2 norm.
float WindowError(const WindowArgs& args, float query_norm, float key_norm);

}  // namespace ebbtide::gpu
