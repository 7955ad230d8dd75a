// SPDX-License-Identifier: Apache-2.0
//
// Blocks in the order in which they came, for carriers to take: the first of them all, or of those
// whose record size has room. Sequences close while their blocks wait: those are passed over where
// they come up, and swept out before they outnumber the others, so that what is closed never piles
// up. Tested by tests/unit/service/block_queue_test.cc.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>

#include "storage/block_record.h"

namespace ebbtide::service {

struct OpenedSequence;

struct QueuedBlock {
  std::shared_ptr<OpenedSequence> sequence;  // Null: none.
  int32_t block = 0;
  storage::RecordSize size;
  uint64_t arrival = 0;  // Its place in the order, given by Push.
};

// Thread-compatible. Holds no sequence.
class BlockQueue {
 public:
  void Push(const QueuedBlock& block);
  // Back to its place in the order.
  void PutBack(const QueuedBlock& block);
  // The first whose sequence still exists and whose record size is not in `full`.
  QueuedBlock Pop(std::span<const storage::RecordSize> full = {});
  size_t size() const;

 private:
  struct Entry {
    std::weak_ptr<OpenedSequence> sequence;
    int32_t block = 0;
    uint64_t arrival = 0;
  };
  void SweepWhereLong();

  static constexpr size_t kSweepMin = 64;
  std::map<storage::RecordSize, std::deque<Entry>> sizes_;  // None empty; each in order.
  uint64_t next_arrival_ = 0;
  size_t sweep_at_ = kSweepMin;  // Twice what the last sweep left.
};

}  // namespace ebbtide::service
