// SPDX-License-Identifier: Apache-2.0
//
// The order of blocks that wait, and what becomes of those whose sequence is gone.

#include "service/model/block_queue.h"

#include <memory>
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

  const std::shared_ptr<const Model> model_ = std::make_shared<const Model>(
      Model{.name = "m", .weights_fingerprint = "w", .geometry = test::SmallGeometry()});
  BlockQueue queue_;
};

TEST_F(BlockQueueTest, FirstComesFirstUnlessPutBack) {
  const SequenceRef a = Sequence(1);
  queue_.PushBack({a, 0});
  queue_.PushBack({a, 1});
  queue_.PushFront({a, 7});

  EXPECT_EQ(queue_.Pop().block, 7);
  EXPECT_EQ(queue_.Pop().block, 0);
  const QueuedBlock last = queue_.Pop();
  EXPECT_EQ(last.block, 1);
  EXPECT_EQ(last.sequence, a);
  EXPECT_EQ(queue_.Pop().sequence, nullptr);
}

TEST_F(BlockQueueTest, BlocksOfASequenceThatIsGoneArePassedOver) {
  const SequenceRef a = Sequence(1);
  SequenceRef b = Sequence(2);
  queue_.PushBack({b, 0});
  queue_.PushBack({a, 5});
  queue_.PushBack({b, 1});
  b.reset();

  EXPECT_EQ(queue_.Pop().block, 5);
  EXPECT_EQ(queue_.Pop().sequence, nullptr);
}

TEST_F(BlockQueueTest, SequencesThatCloseUnaskedForDoNotPileUp) {
  const SequenceRef a = Sequence(0);
  for (int32_t block = 0; block < 100; ++block) queue_.PushBack({a, block});

  for (uint64_t number = 1; number <= 10'000; ++number) {
    queue_.PushBack({Sequence(number), 0});
    ASSERT_LE(queue_.size(), 201U) << "after " << number;
  }
  for (uint64_t number = 1; number <= 10'000; ++number) {
    queue_.PushFront({Sequence(number), 0});
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
