// SPDX-License-Identifier: Apache-2.0
//
// What the KV cache of one token looks like in a model, and what follows from it in bytes. Every
// layer is alike. Tested by tests/unit/service/geometry_test.cc.

#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

#include "gpu/shape.h"
#include "storage/block_record.h"

namespace ebbtide::service {

inline constexpr int kLayersMax = 1024;
inline constexpr int kKvHeadsMax = 1024;
inline constexpr float kScaleMax = 0x1p20F;         // And the least is its inverse.
inline constexpr int kChunkTokensMax = 512;         // Tokens per item of a call.
inline constexpr int kSequenceTokensMax = 1 << 24;  // Indices are int32; 16 Mi tokens leave room.

struct Geometry {
  int layers = 0;
  int query_heads = 0;
  int kv_heads = 0;
  int head_dim = 0;
  gpu::Dtype dtype = gpu::Dtype::kF16;
  float scale = 0;
  int page_tokens = 32;

  int group() const { return query_heads / kv_heads; }  // Query heads that share a lane.
  int lanes() const { return layers * kv_heads; }
  gpu::PageShape page_shape() const { return {page_tokens, head_dim, dtype}; }
  storage::RecordGeometry record(uint64_t fingerprint) const;

  // kInvalidArgument names the field, its value and its limit.
  absl::Status Validate() const;
  friend bool operator==(const Geometry&, const Geometry&) = default;
};

// XXH3 of everything that must agree before one model's bytes may be read as another's.
uint64_t ModelFingerprint(std::string_view name, std::string_view weights,
                          const Geometry& geometry);

}  // namespace ebbtide::service
