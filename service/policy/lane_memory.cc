// SPDX-License-Identifier: Apache-2.0

#include "service/policy/lane_memory.h"

#include <algorithm>

#include "base/status_macros.h"
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

void LaneMemory::Truncate(int32_t length) {
  const auto kept = static_cast<size_t>(length);
  if (value_norm.size() > kept) value_norm.resize(kept);
  if (score.size() > kept) score.resize(kept);
  if (mass.size() > kept) mass.resize(kept);
  const size_t kept_digests =
      kept / static_cast<size_t>(shape.tokens) * gpu::DigestBytes(shape.head_dim);
  if (digests.size() > kept_digests) digests.resize(kept_digests);
}

SlotsOfTokens FindSlots(const LaneMemory& memory, const Lane& lane, int32_t first, int32_t end) {
  SlotsOfTokens slots;
  for (int32_t index = first; index < end; ++index) {
    slots.keys.push_back(memory.key_slot(lane.slot_of(index)));
    slots.values.push_back(memory.value_slot(lane.slot_of(index)));
  }
  return slots;
}

absl::Status DigestCompletePages(std::span<const LaneToDigest> lanes, const gpu::Device& device) {
  struct Page {
    LaneMemory& memory;
    SlotsOfTokens slots;
    std::vector<std::byte> bytes;
    std::vector<std::byte> digest;
  };
  std::vector<Page> pages;
  for (const auto& [lane, memory] : lanes) {
    const int32_t tokens = memory.shape.tokens;
    for (int32_t first = memory.digested_pages() * tokens; first + tokens <= lane.length();
         first += tokens) {
      pages.push_back({.memory = memory,
                       .slots = FindSlots(memory, lane, first, first + tokens),
                       .bytes = std::vector<std::byte>(memory.shape.page_bytes()),
                       .digest = std::vector<std::byte>(gpu::DigestBytes(memory.shape.head_dim))});
    }
  }
  if (pages.empty()) return absl::OkStatus();

  std::vector<gpu::GatherArgs> gathers;
  std::vector<gpu::DigestArgs> digests;
  for (Page& page : pages) {
    gathers.push_back({.shape = page.memory.shape,
                       .key_slot = page.slots.keys,
                       .value_slot = page.slots.values,
                       .page = page.bytes});
    digests.push_back({.shape = page.memory.shape,
                       .tokens = page.memory.shape.tokens,
                       .page = page.bytes,
                       .digest = page.digest});
  }
  EBBTIDE_RETURN_IF_ERROR(device.Run(gathers));
  EBBTIDE_RETURN_IF_ERROR(device.Run(digests));
  for (const Page& page : pages) {  // In order, lane by lane.
    std::vector<std::byte>& all = page.memory.digests;
    all.insert(all.end(), page.digest.begin(), page.digest.end());
  }
  return absl::OkStatus();
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
