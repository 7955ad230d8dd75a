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
  float value_radius;    // >= |v - value_mean as stored| of every token
  float value_norm_max;  // >= |v| of every token
  float key_norm_max;    // >= |k| of every token
  float key_mean_error;  // >= |key_mean as stored - exact mean|, in l2 norm
  int32_t tokens;        // 1 .. page tokens
  int32_t reserved;      // 0
};
static_assert(sizeof(DigestTail) == 24);

constexpr size_t DigestBytes(int head_dim) {
  return 4 * static_cast<size_t>(head_dim) * 2 + sizeof(DigestTail);
}

// Where the parts of a digest lie.
struct DigestView {
  DigestView(const std::byte* digest, int head_dim)
      : key_low(reinterpret_cast<const uint16_t*>(digest)),
        key_high(key_low + head_dim),
        key_mean(key_high + head_dim),
        value_mean(key_mean + head_dim),
        tail(*reinterpret_cast<const DigestTail*>(value_mean + head_dim)) {}

  const uint16_t* key_low;     // [head_dim] f16; infinite where an f32 key is beyond 65504
  const uint16_t* key_high;    // [head_dim]
  const uint16_t* key_mean;    // [head_dim] finite
  const uint16_t* value_mean;  // [head_dim] finite
  const DigestTail& tail;
};

struct DigestArgs {
  PageShape shape;
  int tokens = 0;                   // Tokens in the page, 1 .. shape.tokens.
  std::span<const std::byte> page;  // [K tokens x d][V tokens x d], shape.page_bytes()
  std::span<std::byte> digest;      // DigestBytes(head_dim) out
};

//   Math      channel minimum and maximum of the keys; means of keys and values; radii and norms
//   Numerics  minima round towards -inf, maxima, radii and norms towards +inf, means to the nearest
//             finite f16 with their error kept. Computed in f64 by the reference; on the CPU the
//             box is equal, means differ by at most one step of f16, and radii and norms are at
//             most 1e-5 wider than what the stored means need. CUDA: f64 as the reference
//   Repeats   bit for bit, for one build and SIMD target or device
//   Cost      reads each key and value once
//   Source    Quest arXiv:2406.10774 (box); corrected mean and value ball: docs/architecture.md
void DigestReference(const DigestArgs& args);
void DigestCpu(const DigestArgs& args);

// Stops the process where a size disagrees with the shape.
void CheckDigest(const DigestArgs& args);

}  // namespace ebbtide::gpu
