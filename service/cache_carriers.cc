// SPDX-License-Identifier: Apache-2.0
//
// What carriers ask of the cache: which block to seal or to move down, and where blocks lie.

#include "service/cache.h"

namespace ebbtide::service {

Cache::Waiting Cache::BlocksWaiting() {
  const absl::MutexLock lock(&mu_);
  return {.to_seal = to_seal_.size(), .in_host = in_host_.size()};
}

std::optional<CarryPlan> Cache::PlanSeal() {
  const absl::MutexLock lock(&mu_);
  for (QueuedBlock next = to_seal_.Pop(); next.sequence != nullptr; next = to_seal_.Pop()) {
    Sequence& facts = next.sequence->facts;
    if (facts.is_closed) continue;
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
  return std::nullopt;
}

bool Cache::CommitSeal(const CarryPlan& plan, const absl::StatusOr<TierName>& tier) {
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

std::optional<CarryPlan> Cache::PlanMoveDown() {
  const absl::MutexLock lock(&mu_);
  for (QueuedBlock oldest = in_host_.Pop(); oldest.sequence != nullptr; oldest = in_host_.Pop()) {
    Sequence& facts = oldest.sequence->facts;
    if (facts.is_closed) continue;
    ++facts.carriers;
    return CarryPlan{.sequence = oldest.sequence,
                     .block = oldest.block,
                     .key = facts.key(oldest.block),
                     .positions = {},
                     .slots = {}};
  }
  return std::nullopt;
}

bool Cache::CommitMoveDown(const CarryPlan& plan, CarryOutcome outcome) {
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
