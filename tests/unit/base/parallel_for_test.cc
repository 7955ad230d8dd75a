// SPDX-License-Identifier: Apache-2.0
//
// The promises of ParallelFor. Run under the thread sanitizer, these are also its proof of order.

#include <atomic>
#include <latch>
#include <mutex>
#include <new>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

#include "base/executor.h"
#include "tests/support/random_seed.h"

namespace ebbtide {
namespace {

TEST(ParallelForTest, EveryIndexRunsOnceAndItsWritesAreVisible) {
  for (const int threads : {1, 2, 3, 8}) {
    ParallelFor parallel_for(threads);
    for (const int count : {0, 1, 2, 3, 7, 16, 1000}) {
      std::vector<int> runs(static_cast<size_t>(count), 0);  // Plain: Run orders the writes.

      parallel_for.Run(count, [&](int i) { ++runs[static_cast<size_t>(i)]; });

      EXPECT_EQ(runs, std::vector<int>(static_cast<size_t>(count), 1));
    }
  }
}

TEST(ParallelForTest, HelpersTakePart) {
  ParallelFor parallel_for(4);
  std::latch all_are_in(4);

  // Ends only if four threads are inside at once.
  parallel_for.Run(4, [&](int) { all_are_in.arrive_and_wait(); });
}

TEST(ParallelForTest, OneThreadIsTheCaller) {
  ParallelFor parallel_for(1);
  std::set<std::thread::id> seen;

  parallel_for.Run(100, [&](int) { seen.insert(std::this_thread::get_id()); });

  EXPECT_EQ(seen, std::set<std::thread::id>{std::this_thread::get_id()});
}

TEST(ParallelForTest, CallInsideRunsOnItsOwnThread) {
  ParallelFor outer(3);
  ParallelFor other(3);
  std::atomic<int> strangers = 0;

  outer.Run(6, [&](int) {
    const std::thread::id self = std::this_thread::get_id();
    const auto note = [&](int) { strangers += std::this_thread::get_id() == self ? 0 : 1; };
    outer.Run(5, note);
    other.Run(5, note);
  });

  EXPECT_EQ(strangers, 0);
}

TEST(ParallelForTest, LoopAfterANestedOneUsesHelpersAgain) {
  ParallelFor parallel_for(2);
  parallel_for.Run(2, [&](int) { parallel_for.Run(2, [](int) {}); });
  std::latch both_are_in(2);

  parallel_for.Run(2, [&](int) { both_are_in.arrive_and_wait(); });
}

TEST(ParallelForTest, SingleIndexLeavesHelpersToTheCallInside) {
  ParallelFor parallel_for(2);
  std::latch both_are_in(2);

  parallel_for.Run(1,
                   [&](int) { parallel_for.Run(2, [&](int) { both_are_in.arrive_and_wait(); }); });
}

TEST(ParallelForTest, CallersShareHelpersAndEachGetsItsOwnAnswer) {
  test::ForEachSeed(4, [](uint64_t seed) {
    ParallelFor parallel_for(3);
    std::atomic<int> wrong = 0;
    {
      std::vector<std::jthread> callers;
      for (uint64_t caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&, caller] {
          std::mt19937_64 random(seed + caller);
          for (int round = 0; round < 300; ++round) {
            const int count = static_cast<int>(random() % 17);
            std::vector<int> squares(static_cast<size_t>(count), -1);
            parallel_for.Run(count, [&](int i) { squares[static_cast<size_t>(i)] = i * i; });
            for (int i = 0; i < count; ++i) {
              wrong += squares[static_cast<size_t>(i)] == i * i ? 0 : 1;
            }
          }
        });
      }
    }
    EXPECT_EQ(wrong, 0);
  });
}

// Whoever it comes to, and whether others have work left.
TEST(ParallelForTest, AnExceptionIsItsCallersAndOnlyItsLoopEnds) {
  ParallelFor parallel_for(3);
  const std::thread::id caller = std::this_thread::get_id();
  for (int round = 0; round < 200; ++round) {
    const bool is_helpers = round % 2 == 0;
    std::latch three_are_in(3);
    std::atomic<int> inside = 0;
    EXPECT_THROW(parallel_for.Run(1000,
                                  [&](int i) {
                                    ++inside;
                                    if (i < 3) three_are_in.arrive_and_wait();
                                    const bool is_caller = std::this_thread::get_id() == caller;
                                    --inside;
                                    if (is_caller != is_helpers) throw std::bad_alloc();
                                  }),
                 std::bad_alloc);
    EXPECT_EQ(inside, 0);
    // The next one has all threads.
    std::latch all_are_in(3);
    parallel_for.Run(3, [&](int) { all_are_in.arrive_and_wait(); });
  }
}

TEST(ParallelForTest, AnExceptionOnTheOneThreadIsItsCallers) {
  ParallelFor parallel_for(1);
  int begun = 0;

  EXPECT_THROW(parallel_for.Run(5,
                                [&](int) {
                                  ++begun;
                                  throw std::bad_alloc();
                                }),
               std::bad_alloc);

  EXPECT_EQ(begun, 1);
}

TEST(ParallelForTest, EndsWhetherHelpersSleepSpinOrNeverWorked) {
  for (int round = 0; round < 200; ++round) {
    ParallelFor parallel_for(3);
    if (round % 2 == 0) {
      parallel_for.Run(round % 5, [](int) {});
    }
  }
}

}  // namespace
}  // namespace ebbtide
