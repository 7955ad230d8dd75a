// SPDX-License-Identifier: Apache-2.0

#include "service/model/block_queue.h"

#include <algorithm>
#include <utility>

namespace ebbtide::service {

void BlockQueue::PushBack(const QueuedBlock& block) {
  SweepWhereLong();
  blocks_.push_back({block.sequence, block.block});
}

void BlockQueue::PushFront(const QueuedBlock& block) {
  SweepWhereLong();
  blocks_.push_front({block.sequence, block.block});
}

QueuedBlock BlockQueue::Pop() {
  while (!blocks_.empty()) {
    const Entry next = blocks_.front();
    blocks_.pop_front();
    if (auto sequence = next.sequence.lock()) return {std::move(sequence), next.block};
  }
  return {};
}

void BlockQueue::SweepWhereLong() {
  if (blocks_.size() < sweep_at_) return;
  std::erase_if(blocks_, [](const Entry& entry) { return entry.sequence.expired(); });
  sweep_at_ = std::max(kSweepMin, 2 * blocks_.size());
}

}  // namespace ebbtide::service
