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
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "storage/byte_budget.h"
#include "storage/host/host_tier.h"
#include "tests/support/comes_true.h"
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

// A tier in memory that hangs when told, and the patient one before it.
class PatientTierTest : public testing::Test {
 protected:
  PatientTierTest() { Make(absl::Milliseconds(20)); }
  ~PatientTierTest() override {
    if (!answer_.HasBeenNotified()) answer_.Notify();
  }

  void Make(absl::Duration limit) {
    auto faulty = std::make_unique<FaultyTier>(*host_, 1);
    medium_ = faulty.get();
    patient_ =
        std::make_unique<PatientTier>(std::move(faulty), Patience{.limit = limit, .threads = 2});
  }
  void Hang() {
    medium_->Set({.delay = 1, .on_delay = [this] {
                    ++hanging_;
                    answer_.WaitForNotification();
                  }});
  }
  // A read that leaves the medium hanging.
  void LeaveARead() {
    Hang();
    PageState state;
    EXPECT_THAT(Read(&state, absl::Milliseconds(1)),
                StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("within 1ms")));
    EXPECT_TRUE(test::ComesTrue([&] { return hanging_ > 0; }));
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
  std::atomic<int> hanging_ = 0;
  absl::Notification answer_;
  ByteBudget budget_{8 << 20};
  std::unique_ptr<HostTier> host_ = *HostTier::Create(budget_);
  FaultyTier* medium_ = nullptr;
  std::unique_ptr<PatientTier> patient_;
};

TEST_F(PatientTierTest, AReadThatHangsIsGivenUpAndItsBufferStaysTheCallers) {
  ASSERT_OK(Write());
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

  PageState state;
  EXPECT_TRUE(test::ComesTrue([&] { return absl::IsUnavailable(Read(&state)); }));
  answer_.Notify();
  EXPECT_TRUE(test::ComesTrue([&] { return Read(&state).ok(); }));
}

// Else its slot might be another's before the read comes to it.
TEST_F(PatientTierTest, AnErasureWaitsForWhatAReaderLeft) {
  ASSERT_OK(Write());
  Make(absl::Hours(1));
  LeaveARead();
  absl::Notification erased;
  std::thread eraser([&] {
    EXPECT_OK(patient_->Erase({&kKey, 1}));
    erased.Notify();
  });

  EXPECT_FALSE(erased.WaitForNotificationWithTimeout(absl::Milliseconds(20)));
  EXPECT_EQ(patient_->Usage().blocks, 1U);
  answer_.Notify();
  eraser.join();
  EXPECT_EQ(patient_->Usage().blocks, 0U);
}

TEST_F(PatientTierTest, NothingOvertakesAWriteThatWasGivenUp) {
  Hang();
  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no answer to a write")));
  record_.assign(record_.size(), std::byte{0});  // The caller's again; the write has its own.
  medium_->Set({});

  EXPECT_THAT(patient_->Erase({&kKey, 1}),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("1 earlier calls")));

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
  Hang();
  EXPECT_THAT(Write(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("")));
  record_.assign(record_.size(), std::byte{0});
  medium_->Set({});
  answer_.Notify();

  PageState state;
  ASSERT_TRUE(test::ComesTrue([&] { return Read(&state).ok(); }));
  EXPECT_EQ(state, PageState::kOk);
}

}  // namespace
}  // namespace ebbtide::storage
