// SPDX-License-Identifier: Apache-2.0

#include "service/policy/lane_memory.h"

#include <algorithm>

#include "gpu/kernels/gather.h"

namespace ebbtide::service {

void LaneMemory::NoteTokens(std::span<const float> key_norms, std::span<const float> value_norms,
                            bool keeps_mass) {
  key_norm_max = std::max(key_norm_max, std::ranges::max(key_norms));
  value_norm_max = std::max(value_norm_max, std::ranges::max(value_norms));
  value_norm.insert(value_norm.end(), value_norms.begin(), value_norms.end());
  score.resize(value_norm.size());
  if (keeps_mass) mass.resize(value_norm.size());
}

void LaneMemory::DigestCompletePages(const Lane& lane) {
  const size_t bytes = gpu::DigestBytes(shape.head_dim);
  std::vector<std::byte> page(shape.page_bytes());
  std::vector<const std::byte*> keys(static_cast<size_t>(shape.tokens));
  std::vector<const std::byte*> values(keys.size());
  while ((digested_pages() + 1) * shape.tokens <= lane.length()) {
    const int32_t first = digested_pages() * shape.tokens;
    for (int32_t t = 0; t < shape.tokens; ++t) {
      keys[static_cast<size_t>(t)] = key_slot(lane.slot_of(first + t));
      values[static_cast<size_t>(t)] = value_slot(lane.slot_of(first + t));
    }
    gpu::GatherCpu({.shape = shape, .key_slot = keys, .value_slot = values, .page = page});
    digests.resize(digests.size() + bytes);
    gpu::DigestCpu({.shape = shape,
                    .tokens = shape.tokens,
                    .page = page,
                    .digest = std::span(digests).last(bytes)});
  }
}

std::vector<gpu::Extent> FrameExtents(const LaneMemory& memory,
                                      std::span<const int32_t> slot_index) {
  const auto tokens = static_cast<size_t>(memory.shape.tokens);
  std::vector<gpu::Extent> extents;
  extents.reserve(slot_index.size() / tokens);
  for (size_t slot = 0; slot < slot_index.size(); slot += tokens) {
    extents.push_back({.key = memory.key_slot(static_cast<int32_t>(slot)),
                       .value = memory.value_slot(static_cast<int32_t>(slot)),
                       .index = slot_index.data() + slot,
                       .slots = memory.shape.tokens});
  }
  return extents;
}

uint64_t MetadataBytesPerBlock(const gpu::PageShape& shape, int lanes, bool keeps_mass) {
  // Vectors grow by doubling, so what is reserved may be twice what is used.
  constexpr uint64_t kGrowth = 2;
  const uint64_t per_token = sizeof(float) + sizeof(float) + (keeps_mass ? sizeof(double) : 0) +
                             sizeof(int32_t);  // norm, score, mass, slot number
  const uint64_t per_page = gpu::DigestBytes(shape.head_dim) + sizeof(uint64_t) +
                            static_cast<uint64_t>(shape.tokens) * per_token;
  return kGrowth * (static_cast<uint64_t>(lanes) * per_page +
                    static_cast<uint64_t>(shape.tokens) * sizeof(int64_t));
}

}  // namespace ebbtide::service
