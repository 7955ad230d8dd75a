// SPDX-License-Identifier: Apache-2.0

#include "service/model/block_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace ebbtide::service {

void BlockQueue::Push(const QueuedBlock& block) {
  SweepWhereLong();
  sizes_[block.size].push_back({block.sequence, block.block, next_arrival_++});
}

void BlockQueue::PutBack(const QueuedBlock& block) {
  SweepWhereLong();
  std::deque<Entry>& blocks = sizes_[block.size];
  // Behind the few that were taken before it and are back already.
  const auto next = std::ranges::find_if(
      blocks, [&](const Entry& entry) { return entry.arrival > block.arrival; });
  blocks.insert(next, {block.sequence, block.block, block.arrival});
}

QueuedBlock BlockQueue::Pop(std::span<const storage::RecordSize> full) {
  for (;;) {
    auto first = sizes_.end();
    for (auto it = sizes_.begin(); it != sizes_.end(); ++it) {
      if (std::ranges::find(full, it->first) != full.end()) continue;
      if (first == sizes_.end() || it->second.front().arrival < first->second.front().arrival) {
        first = it;
      }
    }
    if (first == sizes_.end()) return {};
    const storage::RecordSize size = first->first;
    const Entry next = first->second.front();
    first->second.pop_front();
    if (first->second.empty()) sizes_.erase(first);
    if (auto sequence = next.sequence.lock()) {
      return {std::move(sequence), next.block, size, next.arrival};
    }
  }
}

size_t BlockQueue::size() const {
  size_t size = 0;
  for (const auto& [record_size, blocks] : sizes_) size += blocks.size();
  return size;
}

void BlockQueue::SweepWhereLong() {
  if (size() < sweep_at_) return;
  for (auto it = sizes_.begin(); it != sizes_.end();) {
    std::erase_if(it->second, [](const Entry& entry) { return entry.sequence.expired(); });
    it = it->second.empty() ? sizes_.erase(it) : std::next(it);
  }
  sweep_at_ = std::max(kSweepMin, 2 * size());
}

}  // namespace ebbtide::service
