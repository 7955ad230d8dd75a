// SPDX-License-Identifier: Apache-2.0

#include "service/policy/lane_memory.h"

#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "gpu/kernels/gather.h"
#include "service/model/grow.h"

namespace ebbtide::service {

void LaneMemory::NoteTokens(std::span<const float> key_norms, std::span<const float> value_norms,
                            bool keeps_mass) {
  key_norm_max = std::max(key_norm_max, std::ranges::max(key_norms));
  value_norm_max = std::max(value_norm_max, std::ranges::max(value_norms));
  const size_t length = score.size() + value_norms.size();
  ReserveSparingly(score, length);
  score.resize(length);
  if (!keeps_mass) return;
  ReserveSparingly(mass, length);
  mass.resize(length);
}

void LaneMemory::Truncate(int32_t length) {
  const auto kept = static_cast<size_t>(length);
  if (score.size() > kept) score.resize(kept);
  if (mass.size() > kept) mass.resize(kept);
  const size_t kept_digests = kept / static_cast<size_t>(shape.tokens);
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

namespace {

// Pages drawn together: enough to keep all threads busy, and little enough that what was gathered
// is still in the second-level cache when its digest is drawn.
constexpr size_t kDigestedBytesAtOnce = size_t{1} << 20;

struct PageToDigest {
  LaneMemory& memory;
  SlotsOfTokens slots;
};

std::vector<PageToDigest> PagesWithoutDigest(std::span<const LaneToDigest> lanes) {
  std::vector<PageToDigest> pages;
  for (const auto& [lane, memory] : lanes) {
    const int32_t tokens = memory.shape.tokens;
    for (int32_t first = memory.digested_pages() * tokens; first + tokens <= lane.length();
         first += tokens) {
      pages.push_back({.memory = memory, .slots = FindSlots(memory, lane, first, first + tokens)});
    }
  }
  return pages;
}

// `room` takes the pages.
absl::Status DigestPages(std::span<const PageToDigest> pages, std::span<std::byte> room,
                         const gpu::Device& device) {
  const gpu::PageShape& shape = pages.front().memory.shape;
  const size_t digest_bytes = gpu::DigestBytes(shape.head_dim);
  std::vector<std::unique_ptr<std::byte[]>> drawn;
  std::vector<gpu::GatherArgs> gathers;
  std::vector<gpu::DigestArgs> digests;
  for (size_t p = 0; p < pages.size(); ++p) {
    const std::span<std::byte> page = room.subspan(p * shape.page_bytes(), shape.page_bytes());
    gathers.push_back({.shape = shape,
                       .key_slot = pages[p].slots.keys,
                       .value_slot = pages[p].slots.values,
                       .page = page});
    drawn.push_back(std::make_unique<std::byte[]>(digest_bytes));
    digests.push_back({.shape = shape,
                       .tokens = shape.tokens,
                       .page = page,
                       .digest = {drawn.back().get(), digest_bytes}});
  }
  EBBTIDE_RETURN_IF_ERROR(device.Run(gathers));
  EBBTIDE_RETURN_IF_ERROR(device.Run(digests));
  for (size_t p = 0; p < pages.size(); ++p) {  // In order, lane by lane.
    auto& all = pages[p].memory.digests;
    ReserveSparingly(all, all.size() + 1);
    all.push_back(std::move(drawn[p]));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status DigestCompletePages(std::span<const LaneToDigest> lanes, const gpu::Device& device) {
  const std::vector<PageToDigest> pages = PagesWithoutDigest(lanes);
  if (pages.empty()) return absl::OkStatus();
  const size_t page_bytes = pages.front().memory.shape.page_bytes();
  const size_t at_once =
      std::min(pages.size(), std::max<size_t>(kDigestedBytesAtOnce / page_bytes, 1));
  std::vector<std::byte> room(at_once * page_bytes);
  for (size_t first = 0; first < pages.size(); first += at_once) {
    const size_t count = std::min(at_once, pages.size() - first);
    EBBTIDE_RETURN_IF_ERROR(DigestPages(std::span(pages).subspan(first, count), room, device));
  }
  return absl::OkStatus();
}

WorkingFrames FindWorkingFrames(const LaneMemory& memory, std::span<const int32_t> slot_index) {
  const auto tokens = static_cast<size_t>(memory.shape.tokens);
  WorkingFrames frames;
  frames.slot_index.reserve(slot_index.size());  // So that extents may point into it.
  frames.extents.reserve(slot_index.size() / tokens);
  for (size_t slot = 0; slot < slot_index.size(); slot += tokens) {
    const std::span<const int32_t> frame = slot_index.subspan(slot, tokens);
    if (std::ranges::all_of(frame, [](int32_t index) { return index == gpu::kNoToken; })) continue;
    frames.extents.push_back({.key = memory.key_slot(static_cast<int32_t>(slot)),
                              .value = memory.value_slot(static_cast<int32_t>(slot)),
                              .index = frames.slot_index.data() + frames.slot_index.size(),
                              .slots = memory.shape.tokens});
    frames.slot_index.insert(frames.slot_index.end(), frame.begin(), frame.end());
  }
  return frames;
}

uint64_t MetadataBytesPerBlock(const gpu::PageShape& shape, int lanes, bool keeps_mass) {
  constexpr uint64_t kHeap = 2 * sizeof(void*);  // What malloc adds to a digest, about.
  const uint64_t per_token = sizeof(float) + (keeps_mass ? sizeof(double) : 0) +
                             sizeof(int32_t);  // score, mass, slot number
  const uint64_t in_arrays =
      static_cast<uint64_t>(lanes) * (sizeof(uint64_t) + sizeof(void*) +  // who is resident; digest
                                      static_cast<uint64_t>(shape.tokens) * per_token) +
      static_cast<uint64_t>(shape.tokens) * sizeof(int64_t);
  return static_cast<uint64_t>(lanes) * (gpu::DigestBytes(shape.head_dim) + kHeap) + in_arrays +
         in_arrays / kGrowthDivisor;
}

uint64_t MetadataBytesPerLane(int head_dim, int group, int32_t slots, int32_t window) {
  const uint64_t per_slot = 3 * sizeof(int32_t);  // its token; among the free; among the leaving
  const uint64_t per_query =
      static_cast<uint64_t>(group * head_dim) * sizeof(float) + sizeof(int32_t);
  return sizeof(Lane) + sizeof(LaneMemory) + static_cast<uint64_t>(slots) * per_slot +
         static_cast<uint64_t>(window) * per_query;
}

}  // namespace ebbtide::service
