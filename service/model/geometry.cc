// SPDX-License-Identifier: Apache-2.0

#include "service/model/geometry.h"

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"

#include "gpu/kernels/codes.h"
#include "service/reason.h"
#include "xxhash.h"

namespace ebbtide::service {
namespace {

absl::Status OutOfRange(std::string_view field, const std::string& value, std::string_view limit) {
  return Refuse(absl::StatusCode::kInvalidArgument, "GEOMETRY_INVALID",
                absl::StrCat("geometry: ", std::string(field), " is ", value, "; it must be ",
                             std::string(limit)));
}
absl::Status OutOfRange(std::string_view field, int value, std::string_view limit) {
  // A larger number does not fit, and comes as this.
  const bool is_most = value == std::numeric_limits<int>::max();
  return OutOfRange(field, absl::StrCat(value, is_most ? " or more" : ""), limit);
}

}  // namespace

storage::RecordGeometry Geometry::record(uint64_t fingerprint) const {
  return {.layers = static_cast<uint32_t>(layers),
          .kv_heads = static_cast<uint32_t>(kv_heads),
          .head_dim = static_cast<uint32_t>(head_dim),
          .page_tokens = static_cast<uint32_t>(page_tokens),
          .dtype = static_cast<uint32_t>(dtype),
          .page_bytes = static_cast<uint32_t>(page_shape().page_bytes()),
          .coarse_bytes = static_cast<uint32_t>(gpu::CoarseBytes(page_shape())),
          .fine_bytes = static_cast<uint32_t>(gpu::FineBytes(page_shape())),
          .model_fingerprint = fingerprint};
}

absl::Status Geometry::Validate() const {
  if (layers < 1 || layers > kLayersMax) {
    return OutOfRange("layers", layers, absl::StrCat("1 to ", kLayersMax));
  }
  if (kv_heads < 1 || kv_heads > kKvHeadsMax) {
    return OutOfRange("kv_heads", kv_heads, absl::StrCat("1 to ", kKvHeadsMax));
  }
  if (query_heads < kv_heads || query_heads % kv_heads != 0 || group() > gpu::kGroupMax) {
    return OutOfRange("query_heads", query_heads,
                      absl::StrCat("a multiple of kv_heads (", kv_heads, "), at most ",
                                   gpu::kGroupMax, " times it"));
  }
  if (head_dim < 1 || head_dim > gpu::kHeadDimMax) {
    return OutOfRange("head_dim", head_dim, absl::StrCat("1 to ", gpu::kHeadDimMax));
  }
  if (page_tokens != 16 && page_tokens != 32 && page_tokens != 64) {
    return OutOfRange("page_tokens", page_tokens, "16, 32 or 64");
  }
  if (!(scale >= 1 / kScaleMax && scale <= kScaleMax)) {
    return OutOfRange("scale", absl::StrCat(scale),
                      "2^-20 to 2^20 (0 on the wire: 1 / sqrt(head_dim))");
  }
  return absl::OkStatus();
}

uint64_t ModelFingerprint(std::string_view name, std::string_view weights, const Geometry& g) {
  std::string all =
      absl::StrCat(name.size(), ":", std::string(name), weights.size(), ":", std::string(weights));
  absl::StrAppend(&all, "|", g.layers, "|", g.query_heads, "|", g.kv_heads, "|", g.head_dim, "|",
                  static_cast<int>(g.dtype), "|", g.page_tokens, "|");
  all.append(reinterpret_cast<const char*>(&g.scale), sizeof g.scale);
  return XXH3_64bits(all.data(), all.size());
}

}  // namespace ebbtide::service
