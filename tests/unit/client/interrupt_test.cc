// SPDX-License-Identifier: Apache-2.0
//
// What a signal does, and what a second one: each in a process of its own, which may die of it.

#include "client/cli/interrupt.h"

#include <unistd.h>

#include <array>
#include <csignal>
#include <cstdlib>
#include <string>

#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/death_test.h"

namespace ebbtide::cli {
namespace {

constexpr int kAsExpected = 7;

// Ends the process: as expected where the stop comes, and this is why.
[[noreturn]] void EndAtStop(const std::stop_token& stop, const std::string& why) {
  absl::Notification stopped;
  const std::stop_callback note(stop, [&] { stopped.Notify(); });
  stopped.WaitForNotificationWithTimeout(absl::Seconds(30));
  const bool is_told = stop.stop_requested() && CheckInterrupted() == absl::CancelledError(why);
  _exit(is_told ? kAsExpected : 1);
}

using InterruptDeathTest = test::ThreadsafeDeathTest;

TEST_F(InterruptDeathTest, SignalsAtOnceAreOneStop) {
  const auto body = [] {
    const std::stop_token stop = CatchInterrupts();
    if (!CheckInterrupted().ok()) _exit(1);
    for (const int signal : {SIGTERM, SIGTERM, SIGHUP, SIGINT}) raise(signal);
    EndAtStop(stop, "interrupted");
  };
  EXPECT_EXIT(body(), testing::ExitedWithCode(kAsExpected), "");
}

TEST_F(InterruptDeathTest, ASignalAWhileLaterEndsTheProgram) {
  for (const int signal : {SIGINT, SIGTERM}) {
    const auto body = [signal] {
      CatchInterrupts();
      while (true) raise(signal);
    };
    EXPECT_EXIT(body(), testing::KilledBySignal(signal), "");
  }
}

TEST_F(InterruptDeathTest, WhatEndsTheProgramSaysItsLastWordsFirst) {
  const auto body = [] {
    CatchInterrupts();
    { const LastWords earlier("of an earlier time\n"); }
    const LastWords words("sequence 1 is left\n");
    while (true) raise(SIGTERM);
  };
  EXPECT_EXIT(body(), testing::KilledBySignal(SIGTERM), "sequence 1 is left\n");

  const auto without = [] {
    CatchInterrupts();
    { const LastWords over("sequence 1 is left\n"); }
    while (true) raise(SIGTERM);
  };
  EXPECT_EXIT(without(), testing::KilledBySignal(SIGTERM),
              testing::Not(testing::HasSubstr("is left")));
}

TEST_F(InterruptDeathTest, WhatNohupIgnoresStaysIgnored) {
  const auto body = [] {
    signal(SIGHUP, SIG_IGN);
    CatchInterrupts();
    raise(SIGHUP);
    _exit(CheckInterrupted().ok() ? kAsExpected : 1);
  };
  EXPECT_EXIT(body(), testing::ExitedWithCode(kAsExpected), "");
}

// Though nothing is written: it may be long before something is.
TEST_F(InterruptDeathTest, AReaderThatGoesIsAStop) {
  const auto body = [] {
    std::array<int, 2> ends = {};
    if (pipe(ends.data()) != 0 || dup2(ends[1], STDOUT_FILENO) < 0) _exit(1);
    close(ends[1]);
    const std::stop_token stop = CatchInterrupts();
    if (!CheckInterrupted().ok()) _exit(1);
    close(ends[0]);
    EndAtStop(stop, "nobody reads standard output any more");
  };
  EXPECT_EXIT(body(), testing::ExitedWithCode(kAsExpected), "");
}

TEST_F(InterruptDeathTest, WritingForNobodyDoesNotEndTheProgram) {
  const auto body = [] {
    std::array<int, 2> ends = {};
    if (pipe(ends.data()) != 0) _exit(1);
    close(ends[0]);
    CatchInterrupts();
    _exit(write(ends[1], "text", 4) < 0 && CheckInterrupted().ok() ? kAsExpected : 1);
  };
  EXPECT_EXIT(body(), testing::ExitedWithCode(kAsExpected), "");
}

}  // namespace
}  // namespace ebbtide::cli
