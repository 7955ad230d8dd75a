// SPDX-License-Identifier: Apache-2.0

#include "service/model/lane.h"

#include <algorithm>
#include <bit>

#include "base/status_macros.h"
#include "gpu/extent.h"
#include "service/model/grow.h"

namespace ebbtide::service {

Lane::Lane(int page_tokens, int32_t slots, int32_t linger_tokens)
    : page_tokens_(page_tokens),
      linger_tokens_(linger_tokens),
      slot_index_(static_cast<size_t>(slots), gpu::kNoToken) {
  free_.reserve(static_cast<size_t>(slots));
  for (int32_t slot = 0; slot < slots; ++slot) free_.push_back(-slot);  // A heap as it stands.
}

int32_t Lane::absent(int32_t page) const {
  const int32_t tokens = std::min(page_tokens_, length() - page * page_tokens_);
  return tokens - std::popcount(resident_bits(page));
}

void Lane::Free(int32_t slot) {
  free_.push_back(-slot);
  std::push_heap(free_.begin(), free_.end());
}

std::vector<int32_t> Lane::Due(int32_t count, std::span<const int32_t> victims) const {
  if (count == 0) return {};
  std::vector<int32_t> joining(victims.begin(), victims.end());
  std::ranges::sort(joining);
  const auto lingers = [this](int32_t index) {
    const int32_t block_end = (index / page_tokens_ + 1) * page_tokens_;
    return block_end + linger_tokens_ > length();
  };
  // Both lists joined in order, as far as tokens are of age or their slots are needed.
  std::vector<int32_t> due;
  auto left = leaving_.begin();
  auto joined = joining.begin();
  while (left != leaving_.end() || joined != joining.end()) {
    const bool is_joined = joined != joining.end() && (left == leaving_.end() || *joined < *left);
    const int32_t next = is_joined ? *joined : *left;
    if (std::ssize(due) + free_slots() >= count && lingers(next)) break;
    due.push_back(next);
    is_joined ? ++joined : ++left;
  }
  EBBTIDE_CHECK(std::ssize(due) + free_slots() >= count,
                "a lane has slots for its budget and a chunk");
  return due;
}

void Lane::Append(int32_t count, std::vector<int32_t>* slots) {
  const std::vector<int32_t> due = Due(count, {});  // The first of those that are leaving.
  for (const int32_t index : due) {
    Free(slot_of(index));
    slot_of_[static_cast<size_t>(index)] = kNoSlot;
  }
  leaving_.erase(leaving_.begin(), leaving_.begin() + std::ssize(due));
  ReserveSparingly(slot_of_, slot_of_.size() + static_cast<size_t>(count));
  slots->clear();
  for (int32_t i = 0; i < count; ++i) {
    std::pop_heap(free_.begin(), free_.end());
    const int32_t slot = -free_.back();
    free_.pop_back();
    const int32_t index = length();
    slot_index_[static_cast<size_t>(slot)] = index;
    slot_of_.push_back(slot);
    if (index % page_tokens_ == 0) bits_.push_back(0);
    bits_.back() |= uint64_t{1} << (index % page_tokens_);
    slots->push_back(slot);
  }
  resident_ += count;
}

void Lane::Demote(int32_t index) {
  EBBTIDE_CHECK(is_resident(index), "only a resident token can be demoted");
  bits_[static_cast<size_t>(index / page_tokens_)] &= ~(uint64_t{1} << (index % page_tokens_));
  slot_index_[static_cast<size_t>(slot_of(index))] = gpu::kNoToken;
  leaving_.insert(std::ranges::upper_bound(leaving_, index), index);
  --resident_;
  ++demoted_;
}

void Lane::Truncate(int32_t new_length) {
  while (length() > new_length) {
    const int32_t index = length() - 1;
    EBBTIDE_CHECK(is_resident(index), "only open tokens are truncated, and those are resident");
    bits_.back() &= ~(uint64_t{1} << (index % page_tokens_));
    if (index % page_tokens_ == 0) bits_.pop_back();
    slot_index_[static_cast<size_t>(slot_of(index))] = gpu::kNoToken;
    Free(slot_of(index));
    slot_of_.pop_back();
    --resident_;
  }
}

void Lane::CheckInvariants() const {
  int32_t resident = 0;
  int32_t held = 0;
  for (int32_t index = 0; index < length(); ++index) {
    const int32_t slot = slot_of(index);
    held += slot != kNoSlot ? 1 : 0;
    if (!is_resident(index)) continue;
    ++resident;
    EBBTIDE_CHECK(slot != kNoSlot && slot_index_[static_cast<size_t>(slot)] == index,
                  "a resident token is in the slot that names it");
  }
  EBBTIDE_CHECK(resident == resident_, "resident tokens are counted");
  EBBTIDE_CHECK(std::ranges::is_sorted(leaving_), "tokens leave in the order of their indices");
  EBBTIDE_CHECK(held == resident + leaving(), "a slot holds a resident or a leaving token");
  EBBTIDE_CHECK(held + free_slots() == slots(), "every slot is free or holds one token");
  const auto named =
      std::ranges::count_if(slot_index_, [](int32_t i) { return i != gpu::kNoToken; });
  EBBTIDE_CHECK(named == resident_, "slots name resident tokens and no others");
}

}  // namespace ebbtide::service
