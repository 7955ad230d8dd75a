// SPDX-License-Identifier: Apache-2.0
//
// Nobody hangs with a medium that does not answer, and what was given up can't overtake or be
// overtaken. That it is a tier at all: tests/contract/.

#include "storage/patient_tier.h"

#include <atomic>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "storage/byte_budget.h"
#include "storage/host/host_tier.h"
#include "tests/support/comes_true.h"
#include "tests/support/fake_clock.h"
#include "tests/support/faulty_tier.h"
#include "tests/support/record_pattern.h"
#include "tests/support/status_matchers.h"

namespace ebbtide::storage {
namespace {

using test::FaultyTier;
using test::MakeGeometry;
using test::MakeRecord;
using test::StatusIs;
using testing::HasSubstr;

constexpr BlockKey kKey = {1, 0, 0};
constexpr int kThreads = 2;
// What callers wait for is real time: one for calls that are to hang, one for those that are not,
// however busy the machine.
constexpr absl::Duration kShort = absl::Milliseconds(20);
constexpr absl::Duration kLong = absl::Seconds(10);

// A tier in memory that hangs when told, and the patient one before it.
class PatientTierTest : public testing::Test {
 protected:
  PatientTierTest() { Make(kLong); }
  ~PatientTierTest() override {
    if (!answer_.HasBeenNotified()) answer_.Notify();
  }

  void Make(absl::Duration limit) {
    auto faulty = std::make_unique<FaultyTier>(*host_, 1);
    medium_ = faulty.get();
    patient_ = std::make_unique<PatientTier>(std::move(faulty),
                                             Patience{.limit = limit, .threads = kThreads}, clock_);
  }
  void Hang() {
    medium_->Set({.delay = 1, .on_delay = [this] {
                    ++hanging_;
                    answer_.WaitForNotification();
                  }});
  }
  // One read that leaves the medium hanging: it stays long enough to be begun by a thread, and
  // counted. One that no thread has begun is never done.
  void LeaveARead() {
    Hang();
    PageState state;
    EXPECT_TRUE(test::ComesTrue([&] {
      EXPECT_THAT(Read(&state, absl::Milliseconds(100)),
                  StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("within 100ms")));
      return hanging_ > 0;
    }));
    medium_->Set({});
  }
  absl::Status Write() {
    const BlockWrite write = {.key = kKey, .record = record_};
    return patient_->Write({&write, 1});
  }
  absl::Status Read(PageState* state, absl::Duration patience = absl::InfiniteDuration()) {
    PageRead read = {.key = kKey, .page = 0, .into = page_};
    absl::Status status = patient_->Read({&read, 1}, patience);
    *state = read.state;
    return status;
  }

  const RecordGeometry geometry_ = MakeGeometry(2, 2, 4096);
  std::vector<std::byte> record_ = MakeRecord(kKey, geometry_);
  std::vector<std::byte> page_ = std::vector<std::byte>(4096);
  test::FakeClock clock_;  // How long calls have run; what callers wait for is real.
  std::atomic<int> hanging_ = 0;
  absl::Notification answer_;
  ByteBudget budget_{8 << 20};
  std::unique_ptr<HostTier> host_ = *HostTier::Create(budget_);
  FaultyTier* medium_ = nullptr;
  std::unique_ptr<PatientTier> patient_;
};

TEST_F(PatientTierTest, AReadThatHangsIsGivenUpAndItsBufferStaysTheCallers) {
  ASSERT_OK(Write());
  Make(kShort);
  Hang();
  PageState state;

  EXPECT_THAT(Read(&state), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("20ms")));

  page_.assign(4096, std::byte{7});
  medium_->Set({});
  answer_.Notify();
  ASSERT_TRUE(test::ComesTrue([&] { return Read(&state).ok(); }));
  EXPECT_EQ(state, PageState::kOk);
}

// Others go on reading, until what it left outlasts the limit.
TEST_F(PatientTierTest, AReaderInAHurryLeavesAndKeepsNobodyFromReading) {
  ASSERT_OK(Write());
  Make(absl::Hours(1));

  LeaveARead();

  PageState state;
  EXPECT_OK(Read(&state));
  EXPECT_EQ(state, PageState::kOk);
}

TEST_F(PatientTierTest, WhatAReaderInAHurryLeftIsStuckOnceItOutlastsTheLimit) {
  ASSERT_OK(Write());
  LeaveARead();
  clock_.Advance(kLong);

  PageState state;
  EXPECT_TRUE(test::ComesTrue([&] { return absl::IsUnavailable(Read(&state)); }));
  answer_.Notify();
  EXPECT_TRUE(test::ComesTrue([&] { return Read(&state).ok(); }));
}

// A disk may try for half a minute to read a bad sector, and write well elsewhere.
TEST_F(PatientTierTest, AReadThatHangsStopsNoWriteWhileAThreadIsLeft) {
  LeaveARead();
  clock_.Advance(kLong);
  PageState state;
  EXPECT_THAT(Read(&state), StatusIs(absl::StatusCode::kUnavailable));

  EXPECT_OK(Write());
  EXPECT_OK(patient_->Probe());
  EXPECT_OK(patient_->Erase({&kKey, 1}));

  answer_.Notify();
  EXPECT_TRUE(test::ComesTrue([&] { return Read(&state).ok(); }));
}

TEST_F(PatientTierTest, NothingIsBegunWhereAllThreadsHang) {
  Make(absl::Hours(1));
  Hang();
  PageState state;
  ASSERT_TRUE(test::ComesTrue([&] {
    EXPECT_THAT(Read(&state, absl::Milliseconds(1)), StatusIs(absl::StatusCode::kDeadlineExceeded));
    return hanging_ == kThreads;
  }));
  clock_.Advance(absl::Hours(1));

  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kUnavailable,
                                HasSubstr("2 earlier calls still run, 2 of")));
}

// Nobody wants their answers, and a disk that is slow already would be slower by them.
TEST_F(PatientTierTest, ReadsThatNobodyWaitsForAreNotBegun) {
  Make(absl::Hours(1));
  Hang();
  PageState state;
  ASSERT_TRUE(test::ComesTrue([&] {
    EXPECT_THAT(Read(&state, absl::Milliseconds(1)), StatusIs(absl::StatusCode::kDeadlineExceeded));
    return hanging_ == kThreads;
  }));
  for (int i = 0; i < 5; ++i) {
    EXPECT_THAT(Read(&state, absl::Milliseconds(1)), StatusIs(absl::StatusCode::kDeadlineExceeded));
  }

  answer_.Notify();

  EXPECT_OK(Read(&state));
  EXPECT_EQ(hanging_, kThreads + 1);
}

TEST_F(PatientTierTest, WritesAndErasuresWaitForNoReadThatWasLeft) {
  LeaveARead();

  EXPECT_OK(Write());
  EXPECT_OK(patient_->Erase({&kKey, 1}));
  EXPECT_OK(patient_->Probe());
  EXPECT_FALSE(answer_.HasBeenNotified());
}

// Else many readers of a slow disk would have it look hung.
TEST_F(PatientTierTest, AWriteGoesBeforeTheReadsThatWaitForAThread) {
  constexpr int kWaiting = 10;
  Make(absl::Minutes(1));
  absl::Mutex mu;
  int begun = 0;
  int may_end = 0;
  medium_->Set({.delay = 1, .on_delay = [&] {
                  const absl::MutexLock lock(&mu);
                  const int number = begun++;
                  const auto may_go = [&] { return number < may_end; };
                  mu.Await(absl::Condition(&may_go));
                }});
  std::atomic<int> asked = 0;
  absl::Notification written;
  std::vector<std::jthread> threads;
  for (int i = 0; i < kThreads + kWaiting; ++i) {
    threads.emplace_back([&] {
      std::vector<std::byte> page(4096);
      PageRead read = {.key = kKey, .page = 0, .into = page};
      ++asked;
      EXPECT_OK(patient_->Read({&read, 1}, absl::InfiniteDuration()));
    });
  }
  EXPECT_TRUE(test::ComesTrue([&] { return asked == kThreads + kWaiting; }));
  threads.emplace_back([&] {
    EXPECT_OK(Write());
    written.Notify();
  });

  int ended = 0;
  while (!written.WaitForNotificationWithTimeout(absl::Milliseconds(20))) {
    const absl::MutexLock lock(&mu);
    ended = ++may_end;
  }

  EXPECT_LT(ended, kWaiting);
  const absl::MutexLock lock(&mu);
  may_end = kThreads + kWaiting + 1;
}

// Not what waited for others, and then had no time left to its caller.
TEST_F(PatientTierTest, ACallIsStuckOnceItHasItselfRunForTheLimit) {
  Make(kShort);
  Hang();
  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no answer to a write")));
  medium_->Set({});
  PageState state;

  clock_.Advance(kShort - absl::Milliseconds(1));
  EXPECT_TRUE(test::ComesTrue([&] { return Read(&state).ok(); }));  // It is in time when it can be.
  clock_.Advance(absl::Milliseconds(1));
  EXPECT_THAT(Read(&state), StatusIs(absl::StatusCode::kUnavailable,
                                     HasSubstr("1 earlier call still runs, 1 of")));

  answer_.Notify();
  EXPECT_TRUE(test::ComesTrue([&] { return Read(&state).ok(); }));
}

TEST_F(PatientTierTest, NothingOvertakesAWriteThatWasGivenUp) {
  Make(kShort);
  Hang();
  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no answer to a write")));
  record_.assign(record_.size(), std::byte{0});  // The caller's again; the write has its own.
  medium_->Set({});

  EXPECT_THAT(patient_->Erase({&kKey, 1}), StatusIs(absl::StatusCode::kUnavailable,
                                                    HasSubstr("1 earlier call still runs, 1 of")));

  answer_.Notify();
  ASSERT_TRUE(test::ComesTrue([&] { return patient_->Erase({&kKey, 1}).ok(); }));
  EXPECT_EQ(patient_->Usage().blocks, 0U) << "the late write came after the erasure";
}

// As where memory runs out: in time, or when nobody waits any more.
TEST_F(PatientTierTest, WhatACallThrowsIsItsCallersAndStopsNoOther) {
  medium_->Set({.delay = 1, .on_delay = [] { throw std::bad_alloc(); }});
  EXPECT_THROW(Write().IgnoreError(), std::bad_alloc);
  medium_->Set({});
  EXPECT_OK(Write());

  Make(kShort);
  medium_->Set({.delay = 1, .on_delay = [this] {
                  answer_.WaitForNotification();
                  throw std::bad_alloc();
                }});
  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no answer to a write")));
  medium_->Set({});
  answer_.Notify();

  PageState state;
  ASSERT_TRUE(test::ComesTrue([&] { return Read(&state).ok(); }));
  EXPECT_EQ(state, PageState::kOk);
}

TEST_F(PatientTierTest, ALateWriteIsWholeAndSound) {
  Make(kShort);
  Hang();
  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("")));
  record_.assign(record_.size(), std::byte{0});
  medium_->Set({});
  answer_.Notify();

  PageState state = PageState::kMissing;
  EXPECT_TRUE(test::ComesTrue([&] { return Read(&state).ok() && state != PageState::kMissing; }));
  EXPECT_EQ(state, PageState::kOk);
}

}  // namespace
}  // namespace ebbtide::storage
