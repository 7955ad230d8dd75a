// SPDX-License-Identifier: Apache-2.0
//
// The order of blocks that wait, and what becomes of those whose sequence is gone.

#include "service/model/block_queue.h"

#include <memory>
#include <span>
#include <string>

#include "gtest/gtest.h"

#include "tests/unit/service/cache_stand.h"

namespace ebbtide::service {
namespace {

class BlockQueueTest : public testing::Test {
 protected:
  SequenceRef Sequence(uint64_t number) {
    return std::make_shared<OpenedSequence>(number, OpenArgs{}, model_, ResolvedPolicy{});
  }

  void Push(const SequenceRef& sequence, int32_t block, const storage::RecordSize& size) {
    queue_.Push({.sequence = sequence, .block = block, .size = size});
  }

  static constexpr storage::RecordSize kSmall = {.bytes = 1000};
  static constexpr storage::RecordSize kLarge = {.bytes = 3000};
  const std::shared_ptr<const Model> model_ = std::make_shared<const Model>(
      Model{.name = "m", .weights_fingerprint = "w", .geometry = test::SmallGeometry()});
  BlockQueue queue_;
};

TEST_F(BlockQueueTest, FirstComesFirst) {
  const SequenceRef a = Sequence(1);
  Push(a, 0, kSmall);
  Push(a, 1, kLarge);
  Push(a, 2, kSmall);

  EXPECT_EQ(queue_.Pop().block, 0);
  EXPECT_EQ(queue_.Pop().block, 1);
  const QueuedBlock last = queue_.Pop();
  EXPECT_EQ(last.block, 2);
  EXPECT_EQ(last.sequence, a);
  EXPECT_EQ(last.size, kSmall);
  EXPECT_EQ(queue_.Pop().sequence, nullptr);
}

TEST_F(BlockQueueTest, WhatIsPutBackKeepsItsPlace) {
  const SequenceRef a = Sequence(1);
  for (int32_t block = 0; block < 6; ++block) Push(a, block, block % 2 == 0 ? kSmall : kLarge);
  const QueuedBlock zero = queue_.Pop();
  const QueuedBlock one = queue_.Pop();
  const QueuedBlock two = queue_.Pop();

  queue_.PutBack(two);
  queue_.PutBack(zero);
  queue_.PutBack(one);

  for (int32_t block = 0; block < 6; ++block) EXPECT_EQ(queue_.Pop().block, block);
}

TEST_F(BlockQueueTest, FullSizesWaitInTheirPlace) {
  const SequenceRef a = Sequence(1);
  for (int32_t block = 0; block < 6; ++block) Push(a, block, block < 4 ? kSmall : kLarge);
  const storage::RecordSize sizes[] = {kSmall, kLarge};

  EXPECT_EQ(queue_.Pop(std::span(sizes).first(1)).block, 4);
  EXPECT_EQ(queue_.Pop(sizes).sequence, nullptr);
  EXPECT_EQ(queue_.Pop().block, 0);
  EXPECT_EQ(queue_.Pop(std::span(sizes).first(1)).block, 5);
  EXPECT_EQ(queue_.Pop(std::span(sizes).first(1)).sequence, nullptr);
  EXPECT_EQ(queue_.Pop(std::span(sizes).last(1)).block, 1);
}

TEST_F(BlockQueueTest, BlocksOfASequenceThatIsGoneArePassedOver) {
  const SequenceRef a = Sequence(1);
  SequenceRef b = Sequence(2);
  Push(b, 0, kSmall);
  Push(a, 5, kSmall);
  Push(b, 1, kLarge);
  b.reset();

  EXPECT_EQ(queue_.Pop().block, 5);
  EXPECT_EQ(queue_.Pop().sequence, nullptr);
}

TEST_F(BlockQueueTest, SequencesThatCloseUnaskedForDoNotPileUp) {
  const SequenceRef a = Sequence(0);
  for (int32_t block = 0; block < 100; ++block) Push(a, block, kSmall);

  for (uint64_t number = 1; number <= 10'000; ++number) {
    Push(Sequence(number), 0, {.bytes = number});
    ASSERT_LE(queue_.size(), 201U) << "after " << number;
  }
  for (uint64_t number = 1; number <= 10'000; ++number) {
    queue_.PutBack({.sequence = Sequence(number), .block = 0, .size = kSmall});
    ASSERT_LE(queue_.size(), 201U) << "after " << number;
  }

  for (int32_t block = 0; block < 100; ++block) {  // None lost, in order.
    const QueuedBlock next = queue_.Pop();
    ASSERT_EQ(next.sequence, a);
    ASSERT_EQ(next.block, block);
  }
}

}  // namespace
}  // namespace ebbtide::service
