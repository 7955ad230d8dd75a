// SPDX-License-Identifier: Apache-2.0
//
// What carriers ask of the cache: which block to seal or to move down, and where blocks lie.

#include <algorithm>

#include "service/cache.h"

namespace ebbtide::service {

Cache::Waiting Cache::BlocksWaiting() {
  const absl::MutexLock lock(&mu_);
  return {.to_seal = to_seal_.size(), .in_host = in_host_.size()};
}

// The first that is open and whose record is of no size in `full`.
QueuedBlock Cache::PopOf(BlockQueue& queue, std::span<const uint64_t> full) {
  for (size_t left = queue.size(); left > 0; --left) {
    const QueuedBlock next = queue.Pop();
    if (next.sequence == nullptr) return next;
    const Sequence& facts = next.sequence->facts;
    if (facts.is_closed) continue;
    if (std::ranges::find(full, facts.model->record_bytes()) == full.end()) {
      return next;
    }
    queue.PushBack(next);
  }
  return {};
}

std::optional<CarryPlan> Cache::PlanSeal(std::span<const uint64_t> full) noexcept {
  const absl::MutexLock lock(&mu_);
  const QueuedBlock next = PopOf(to_seal_, full);
  if (next.sequence == nullptr) return std::nullopt;
  Sequence& facts = next.sequence->facts;
  const int32_t page_tokens = facts.geometry().page_tokens;
  const int32_t first = next.block * page_tokens;
  CarryPlan plan{.sequence = next.sequence, .block = next.block, .key = facts.key(next.block)};
  plan.positions.assign(facts.positions.begin() + first,
                        facts.positions.begin() + first + page_tokens);
  plan.slots.reserve(facts.lanes.size() * static_cast<size_t>(page_tokens));
  for (const Lane& lane : facts.lanes) {
    for (int32_t index = first; index < first + page_tokens; ++index) {
      plan.slots.push_back(lane.slot_of(index));
    }
  }
  ++facts.carriers;
  return plan;
}

bool Cache::CommitSeal(const CarryPlan& plan, const absl::StatusOr<TierName>& tier) noexcept {
  const absl::MutexLock lock(&mu_);
  Sequence& facts = plan.sequence->facts;
  --facts.carriers;
  if (facts.is_closed) return true;
  if (!tier.ok()) {
    const QueuedBlock block{plan.sequence, plan.block};
    absl::IsResourceExhausted(tier.status()) ? to_seal_.PushBack(block) : to_seal_.PushFront(block);
    return false;
  }
  Block& block = facts.blocks[static_cast<size_t>(plan.block)];
  block.stage = BlockStage::kSealed;
  block.tier = *tier;
  if (*tier == TierName::kHost) in_host_.PushBack({plan.sequence, plan.block});
  --unsealed_;
  ++stats_.blocks_sealed;
  return false;
}

std::optional<CarryPlan> Cache::PlanMoveDown(std::span<const uint64_t> full) noexcept {
  const absl::MutexLock lock(&mu_);
  const QueuedBlock oldest = PopOf(in_host_, full);
  if (oldest.sequence == nullptr) return std::nullopt;
  Sequence& facts = oldest.sequence->facts;
  ++facts.carriers;
  return CarryPlan{.sequence = oldest.sequence,
                   .block = oldest.block,
                   .key = facts.key(oldest.block),
                   .positions = {},
                   .slots = {}};
}

bool Cache::CommitMoveDown(const CarryPlan& plan, CarryOutcome outcome) noexcept {
  const absl::MutexLock lock(&mu_);
  Sequence& facts = plan.sequence->facts;
  --facts.carriers;
  if (facts.is_closed) return true;
  if (outcome == CarryOutcome::kRetry) in_host_.PushFront({plan.sequence, plan.block});
  if (outcome == CarryOutcome::kNoRoom) in_host_.PushBack({plan.sequence, plan.block});
  if (outcome != CarryOutcome::kMoved) return false;
  facts.blocks[static_cast<size_t>(plan.block)].tier = TierName::kRocksdb;
  ++stats_.blocks_moved_down;
  return false;
}

std::vector<Block> Cache::Places(const SequenceRef& sequence) {
  const absl::MutexLock lock(&mu_);
  return sequence->facts.blocks;
}

std::vector<LostPage> Cache::NoteLost(const SequenceRef& sequence, int layer,
                                      std::span<const LostPage> pages) {
  const absl::MutexLock lock(&mu_);
  std::vector<LostPage> fresh;
  for (const LostPage& page : pages) {
    const auto lane =
        static_cast<uint32_t>(layer * sequence->facts.geometry().kv_heads) + page.kv_head;
    if (!sequence->facts.lost_pages.insert({lane, page.first_index}).second) continue;
    ++stats_.pages_lost[std::string(page.reason())];
    fresh.push_back(page);
  }
  return fresh;
}

bool Cache::HasUnsealed() {
  const absl::MutexLock lock(&mu_);
  return unsealed_ > 0;
}

void Cache::WaitForSeals(absl::Duration deadline) {
  const absl::MutexLock lock(&mu_);
  const auto is_done = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return unsealed_ == 0; };
  mu_.AwaitWithTimeout(absl::Condition(&is_done), deadline - clock_.SinceStart());
}

}  // namespace ebbtide::service
