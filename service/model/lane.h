// SPDX-License-Identifier: Apache-2.0
//
// The history of one (sequence, layer, kv head): which tokens are resident, which slots hold them.
// It knows numbers, not bytes: slot s lies in frame s / page_tokens of the run of frames that the
// lane was given for life. Which slot a token takes follows from the calls alone, never from when
// blocks were confirmed, since slots decide in which order sums are rounded.
// Tested by tests/unit/service/lane_test.cc.

#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace ebbtide::service {

inline constexpr int32_t kNoSlot = -1;

// A token is in one of three states:
//
//   resident  in a slot, attended
//   leaving   demoted: not attended; its bytes stay in its slot until that is taken again
//   absent    demoted, without a slot; its block is confirmed below
//
// Thread-compatible: changed under the cache's lock only.
class Lane {
 public:
  // A slot that a token left is free once `linger_tokens` follow the token's block, or where a step
  // finds no other; both give the block time to be confirmed.
  Lane(int page_tokens, int32_t slots, int32_t linger_tokens);

  int32_t length() const { return static_cast<int32_t>(slot_of_.size()); }
  int32_t resident() const { return resident_; }
  int32_t leaving() const { return static_cast<int32_t>(leaving_.size()); }
  uint64_t demoted() const { return demoted_; }
  int32_t free_slots() const { return static_cast<int32_t>(free_.size()); }
  int32_t slots() const { return static_cast<int32_t>(slot_index_.size()); }

  // Slot that holds the bytes of `index` (resident or leaving), or kNoSlot.
  int32_t slot_of(int32_t index) const { return slot_of_[static_cast<size_t>(index)]; }
  bool is_resident(int32_t index) const {
    return (resident_bits(index / page_tokens_) >> (index % page_tokens_) & 1) != 0;
  }
  // Bit t: is token page * page_tokens + t resident?
  uint64_t resident_bits(int32_t page) const { return bits_[static_cast<size_t>(page)]; }
  int32_t pages() const { return static_cast<int32_t>(bits_.size()); }
  // How many of a page's tokens are not resident.
  int32_t absent(int32_t page) const;

  // [slots] the resident token in each slot, or gpu::kNoToken.
  std::span<const int32_t> slot_index() const { return slot_index_; }

  // The leaving tokens, once `victims` have left too, whose slots are free when `count` tokens are
  // appended: their blocks must be confirmed first. Ascending.
  std::vector<int32_t> Due(int32_t count, std::span<const int32_t> victims) const;
  // `index` is resident; from now on it is leaving.
  void Demote(int32_t index);
  // Frees the slots of Due(count), whose tokens are absent from now on, and gives each of `count`
  // new tokens the lowest free slot.
  void Append(int32_t count, std::vector<int32_t>* slots);
  // Forgets the tokens from `length` on; their slots are free again.
  void Truncate(int32_t length);

  // Stops the process where the lane contradicts itself; tests call it after each step.
  void CheckInvariants() const;

 private:
  void Free(int32_t slot);

  const int page_tokens_;
  const int32_t linger_tokens_;
  std::vector<int32_t> slot_index_;  // [slots]
  std::vector<int32_t> slot_of_;     // [length]
  std::vector<uint64_t> bits_;       // [pages] resident tokens
  std::vector<int32_t> free_;        // Max-heap by negated slot: the lowest slot is taken first.
  std::vector<int32_t> leaving_;     // Token indices, ascending.
  int32_t resident_ = 0;
  uint64_t demoted_ = 0;
};

}  // namespace ebbtide::service
