// SPDX-License-Identifier: Apache-2.0
//
// What a page leaves within reach when its tokens are absent: enough to bound what it could add to
// an answer without reading it. Bounds are drawn from it by bound.h.
// Tested by tests/unit/gpu/digest_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gpu/shape.h"

namespace ebbtide::gpu {

// A page's digest lies in one flat run of bytes, `DigestBytes(head_dim)` long, 4-byte aligned:
// [key_low f16 x d][key_high f16 x d][key_mean f16 x d][value_mean f16 x d][DigestTail].
struct DigestTail {
  float value_radius;     // >= |v - value_mean as stored| of every token
  float value_norm_max;   // >= |v| of every token
  float key_norm_max;     // >= |k| of every token
  float key_mean_error;   // >= largest |component| difference of key_mean as stored and exact
  int32_t tokens;         // 1 .. page tokens
  int32_t reserved;
};
static_assert(sizeof(DigestTail) == 24);

constexpr size_t DigestBytes(int head_dim) {
  return 4 * static_cast<size_t>(head_dim) * 2 + sizeof(DigestTail);
}

struct DigestArgs {
  PageShape shape;
  int tokens = 0;                    // Tokens in the page, 1 .. shape.tokens.
  std::span<const std::byte> page;   // [K tokens x d][V tokens x d], shape.page_bytes()
  std::span<std::byte> digest;       // DigestBytes(head_dim) out
};

//   Math      channel minimum and maximum of the keys; means of keys and values; radii and norms
//   Numerics  minima round towards -inf, maxima and radii towards +inf, means to nearest with their
//             error kept; computed in f64 by the reference, CPU equal in every stored bound or wider
//             by at most one step of its format
//   Repeats   bit for bit, for one build and SIMD target
//   Cost      reads each key and value once
//   Source    Quest arXiv:2406.10774 (box); corrected mean and value ball: docs/architecture.md
void DigestReference(const DigestArgs& args);
void DigestCpu(const DigestArgs& args);

}  // namespace ebbtide::gpu
