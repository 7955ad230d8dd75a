// SPDX-License-Identifier: Apache-2.0
//
// Attention of a few queries over the tokens of one lane, wherever they lie, with what scoring and
// recall need from the same pass: log-sum-exp and logits.
// Tested by tests/unit/gpu/attend_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gpu/extent.h"
#include "gpu/shape.h"

namespace ebbtide::gpu {

// One lane. Rows are ordered [group, queries]: row r = g * queries + m.
struct AttendArgs {
  Dtype dtype = Dtype::kF16;
  int head_dim = 0;
  int group = 1;                         // Query heads that share this lane.
  int queries = 1;                       // Tokens that ask.
  float scale = 0;                       // Usually 1 / sqrt(head_dim).
  std::span<const Extent> extents;       // Of at most kPageTokensMax slots each.
  std::span<const float> query;          // [group, queries, head_dim]
  std::span<const int32_t> query_index;  // [queries] a query sees tokens with index <= its own
  std::span<float> output;  // [group, queries, head_dim] out; zeros where nothing is seen
  std::span<float> lse;     // [group, queries] out; -inf where nothing is seen
  std::span<float> logits;  // [group, queries, slots] out, slots of all extents; empty: not wanted
  // The same attention over each extent alone, as if its slots were all; both empty: not wanted.
  std::span<float> part_output = {};  // [extents, group, queries, head_dim] out
  std::span<float> part_lse = {};     // [extents, group, queries] out
};

// Partial attention over `extents`, ready to be merged with other parts (merge.h).
//
//   Math      z[r,s] = scale * query[r] . key[s], or -inf where r does not see s: where index[s] is
//             kNoToken or above query_index[m]
//             lse[r] = log sum_s exp(z[r,s]);  output[r] = sum_s exp(z[r,s] - lse[r]) * value[s]
//             part_lse[x,r], part_output[x,r]: the same sums over the slots of extent x; (0, -inf)
//             where r sees none of them. Merged (merge.h) they are output and lse.
//   Layout    row-major, dense; slots and parts follow each other in the order of `extents`
//   Units     natural logarithm
//   Numerics  products and sums in f32, parts joined in f64; CPU and CUDA within 1e-6 relative of
//   the
//             f64 reference on outputs of unit scale, logits within AttendLogitError; K or V of
//             hidden slots is never used
//   Repeats   bit for bit, for one build and SIMD target or GPU: neither threads, blocks nor other
//             lanes matter, nor whether logits are wanted. Where parts are wanted, sums end where
//             extents do: last bits of output and lse may differ from those of a call without.
//   Cost      4 * group * queries * slots * head_dim flops; reads each key and value once per tile
//             of rows. Parts: extents * group * queries * (head_dim + 1) * 4 bytes more, written
//             once, and read once by whoever asked for them (page_damage.h)
//   Order     done on return; CUDA: gpu/cuda/kernels.h
//   Source    online softmax, arXiv:1805.02867; split-KV partials, flash-decoding
void AttendReference(const AttendArgs& args);
void AttendCpu(const AttendArgs& args);

// Slots over all extents: the length of a row of logits.
size_t AttendSlots(const AttendArgs& args);

// Stops the process where a span or an extent disagrees with the shape.
void CheckAttend(const AttendArgs& args);

// Upper bound on |z - exact z| of either implementation, for |query| and max |key| in l2 norm. It
// holds the rounding of z - max inside the softmax as well: weights are true to a factor of
// e^error.
float AttendLogitError(int head_dim, float scale, float query_norm, float key_norm);

// Upper bound, relative to sum_s alpha[s] |value[s]|, on |output - exact output for those logits|
// over at most `slots` slots: what weights, sums and merges of parts round off.
float AttendSumError(size_t slots);

}  // namespace ebbtide::gpu
