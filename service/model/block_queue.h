// SPDX-License-Identifier: Apache-2.0
//
// Blocks in the order in which carriers are to take them. Sequences close while their blocks wait:
// those are passed over where they come up, and swept out before they outnumber the others, so that
// what is closed never piles up. Tested by tests/unit/service/block_queue_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

namespace ebbtide::service {

struct OpenedSequence;

struct QueuedBlock {
  std::shared_ptr<OpenedSequence> sequence;  // Null: none.
  int32_t block = 0;
};

// Thread-compatible. Holds no sequence.
class BlockQueue {
 public:
  void PushBack(const QueuedBlock& block);
  // To be the next again.
  void PushFront(const QueuedBlock& block);
  // The first whose sequence still exists.
  QueuedBlock Pop();
  size_t size() const { return blocks_.size(); }

 private:
  struct Entry {
    std::weak_ptr<OpenedSequence> sequence;
    int32_t block = 0;
  };
  void SweepWhereLong();

  static constexpr size_t kSweepMin = 64;
  std::deque<Entry> blocks_;
  size_t sweep_at_ = kSweepMin;  // Twice what the last sweep left.
};

}  // namespace ebbtide::service
