// SPDX-License-Identifier: Apache-2.0
//
// What carriers ask of the cache: which block to seal or to move down, and where blocks lie.

#include "service/cache.h"

namespace ebbtide::service {

namespace {

QueuedBlock Queued(const CarryPlan& plan) {
  return {.sequence = plan.sequence,
          .block = plan.block,
          .size = plan.sequence->model->record_size(),
          .arrival = plan.arrival};
}

}  // namespace

size_t Cache::BlocksToSeal() {
  const absl::MutexLock lock(&mu_);
  return to_seal_.size();
}

QueuedBlock Cache::PopOpen(BlockQueue& queue, std::span<const storage::RecordSize> full) {
  for (;;) {
    QueuedBlock next = queue.Pop(full);
    if (next.sequence == nullptr || !next.sequence->facts.is_closed) return next;
  }
}

std::optional<CarryPlan> Cache::PlanSeal(std::span<const storage::RecordSize> full) noexcept {
  const absl::MutexLock lock(&mu_);
  const QueuedBlock next = PopOpen(to_seal_, full);
  if (next.sequence == nullptr) return std::nullopt;
  Sequence& facts = next.sequence->facts;
  const int32_t page_tokens = facts.geometry().page_tokens;
  const int32_t first = next.block * page_tokens;
  CarryPlan plan{.sequence = next.sequence,
                 .block = next.block,
                 .key = facts.key(next.block),
                 .arrival = next.arrival};
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
    to_seal_.PutBack(Queued(plan));
    return false;
  }
  Block& block = facts.blocks[static_cast<size_t>(plan.block)];
  block.stage = BlockStage::kSealed;
  block.tier = *tier;
  if (*tier == TierName::kHost) in_host_.Push(Queued(plan));
  if (*tier == TierName::kRocksdb) ++facts.blocks_below;
  --unsealed_;
  ++stats_.blocks_sealed;
  return false;
}

std::optional<CarryPlan> Cache::PlanMoveDown(std::span<const storage::RecordSize> full) noexcept {
  const absl::MutexLock lock(&mu_);
  const QueuedBlock oldest = PopOpen(in_host_, full);
  if (oldest.sequence == nullptr) return std::nullopt;
  Sequence& facts = oldest.sequence->facts;
  ++facts.carriers;
  return CarryPlan{.sequence = oldest.sequence,
                   .block = oldest.block,
                   .key = facts.key(oldest.block),
                   .positions = {},
                   .slots = {},
                   .arrival = oldest.arrival};
}

bool Cache::CommitMoveDown(const CarryPlan& plan, CarryOutcome outcome) noexcept {
  const absl::MutexLock lock(&mu_);
  Sequence& facts = plan.sequence->facts;
  --facts.carriers;
  if (facts.is_closed) return true;
  if (outcome == CarryOutcome::kRetry) in_host_.PutBack(Queued(plan));
  if (outcome != CarryOutcome::kMoved) return false;
  facts.blocks[static_cast<size_t>(plan.block)].tier = TierName::kRocksdb;
  ++facts.blocks_below;
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
