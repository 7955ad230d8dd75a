// SPDX-License-Identifier: Apache-2.0
//
// The promises of an Executor with threads. Jobs are held back by a gate, never by a sleep.

#include "base/executor.h"

#include <atomic>
#include <latch>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/status_matchers.h"

namespace ebbtide {
namespace {

using test::StatusIs;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(ThreadExecutorTest, EveryJobRunsOnce) {
  constexpr int kJobs = 1000;
  std::vector<std::atomic<int>> runs(kJobs);
  std::latch done(kJobs);
  const auto executor = MakeThreadExecutor("test", 3, kJobs);

  for (int i = 0; i < kJobs; ++i) {
    ASSERT_OK(executor->Submit("count", [&runs, &done, i] {
      ++runs[static_cast<size_t>(i)];
      done.count_down();
    }));
  }
  done.wait();

  for (const auto& count : runs) {
    EXPECT_EQ(count, 1);
  }
}

TEST(ThreadExecutorTest, OneThreadKeepsTheOrder) {
  std::vector<int> order;
  std::latch done(3);
  const auto executor = MakeThreadExecutor("test", 1, 3);

  for (int i = 0; i < 3; ++i) {
    ASSERT_OK(executor->Submit("note", [&order, &done, i] {
      order.push_back(i);
      done.count_down();
    }));
  }
  done.wait();

  EXPECT_THAT(order, ElementsAre(0, 1, 2));
}

TEST(ThreadExecutorTest, FullQueueRefusesAndNamesItsLimit) {
  std::latch is_running(1);
  std::latch gate(1);
  const auto executor = MakeThreadExecutor("mover", 1, 2);
  ASSERT_OK(executor->Submit("hold", [&] {
    is_running.count_down();
    gate.wait();
  }));
  is_running.wait();
  ASSERT_OK(executor->Submit("first", [] {}));
  ASSERT_OK(executor->Submit("second", [] {}));

  const absl::Status refused = executor->Submit("third", [] {});

  gate.count_down();
  EXPECT_THAT(refused,
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("mover"), HasSubstr("2 of 2"), HasSubstr("third"))));
}

TEST(ThreadExecutorTest, JobMaySubmitAnother) {
  std::latch done(1);
  const auto executor = MakeThreadExecutor("test", 1, 1);

  ASSERT_OK(executor->Submit(
      "outer", [&] { EXPECT_OK(executor->Submit("inner", [&] { done.count_down(); })); }));

  done.wait();
}

TEST(ThreadExecutorTest, JobThatEndsInAnExceptionEndsNoOther) {
  std::latch done(1);
  const auto executor = MakeThreadExecutor("test", 1, 4);

  ASSERT_OK(executor->Submit("unlucky", [] { throw std::bad_alloc(); }));
  ASSERT_OK(executor->Submit("odd", [] { throw 7; }));
  ASSERT_OK(executor->Submit("next", [&] { done.count_down(); }));

  done.wait();
}

TEST(ThreadExecutorTest, EndFinishesRunningJobsAndForgetsWaitingOnes) {
  std::latch is_running(1);
  std::latch gate(1);
  std::atomic<bool> is_finished = false;
  const auto witness = std::make_shared<int>(0);
  auto executor = MakeThreadExecutor("test", 1, 4);
  ASSERT_OK(executor->Submit("running", [&] {
    is_running.count_down();
    gate.wait();
    is_finished = true;
  }));
  is_running.wait();
  ASSERT_OK(executor->Submit("waiting", [witness] { ++*witness; }));

  const std::jthread opener([&] { gate.count_down(); });
  executor.reset();

  EXPECT_TRUE(is_finished);
  EXPECT_EQ(witness.use_count(), 1);  // The waiting job is gone, whether it still ran or not.
}

}  // namespace
}  // namespace ebbtide
