// SPDX-License-Identifier: Apache-2.0
//
// Processes of a shell's making: that they end, fail, refuse to end, or never began.

#include "client/cli/daemon_process.h"

#include <pthread.h>

#include <atomic>
#include <csignal>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/comes_true.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::cli {
namespace {

using absl::StatusCode;
using test::IsOkAndHolds;
using test::StatusIs;
using testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(30);

CommandLine Shell(const std::string& script) {
  return {.program = "/bin/sh", .arguments = {"-c", script}};
}

class DaemonProcessTest : public testing::Test {
 protected:
  std::unique_ptr<DaemonProcess> Start(const std::string& script) {
    absl::StatusOr<std::unique_ptr<DaemonProcess>> process =
        DaemonProcess::Start(Shell(script), log_);
    EXPECT_OK(process);
    return *std::move(process);
  }

  std::string Log() const {
    std::ostringstream text;
    text << std::ifstream(log_).rdbuf();
    return text.str();
  }

  test::TempFolder folder_;
  const std::string log_ = (folder_.path() / "log").string();
};

TEST_F(DaemonProcessTest, RunToEndAnswersTheExitCode) {
  EXPECT_THAT(RunToEnd(Shell("exit 0")), IsOkAndHolds(0));
  EXPECT_THAT(RunToEnd(Shell("exit 3")), IsOkAndHolds(3));
  EXPECT_THAT(RunToEnd(Shell("kill -KILL $$")), IsOkAndHolds(128 + 9));

  std::string output = "before";
  EXPECT_THAT(RunToEnd(Shell("printf one; printf two >&2; exit 3"), &output), IsOkAndHolds(3));
  EXPECT_EQ(output, "onetwo");
  EXPECT_THAT(RunToEnd(Shell("head -c 10000 /dev/zero"), &output), IsOkAndHolds(0));
  EXPECT_EQ(output, std::string(10000, '\0'));
  EXPECT_THAT(RunToEnd({.program = (folder_.path() / "none").string()}), IsOkAndHolds(127));
}

TEST_F(DaemonProcessTest, BothOutputsGoToTheLog) {
  const auto process = Start("echo out; echo err >&2");

  ASSERT_TRUE(process->EndsWithin(kLong));

  EXPECT_EQ(Log(), "out\nerr\n");
}

TEST_F(DaemonProcessTest, StopAsksAndIsObeyed) {
  // The shell reports the trap's exit code; `wait` lets it answer the signal at once.
  const auto process = Start("trap 'echo bye; kill $!; exit 0' TERM; sleep 1000 & echo up; wait");
  ASSERT_TRUE(test::ComesTrue(
      [&] { return Log() == "up\n" || process->EndsWithin(absl::Milliseconds(5)); }));
  EXPECT_TRUE(process->IsRunning());

  EXPECT_OK(process->Stop(kLong));

  EXPECT_EQ(Log(), "up\nbye\n");
  EXPECT_FALSE(process->IsRunning());
}

TEST_F(DaemonProcessTest, WhatDoesNotEndIsKilled) {
  const auto process = Start("trap '' TERM; echo up; while :; do :; done");
  ASSERT_TRUE(test::ComesTrue(
      [&] { return Log() == "up\n" || process->EndsWithin(absl::Milliseconds(5)); }));

  EXPECT_THAT(process->Stop(absl::Milliseconds(20)),
              StatusIs(StatusCode::kDeadlineExceeded, HasSubstr("was killed")));

  EXPECT_FALSE(process->IsRunning());
}

// A signal ends the wait for the process early, which is none of its doing.
TEST_F(DaemonProcessTest, SignalsDoNotCutTheStopShort) {
  const auto process = Start("trap 'echo bye; kill $!; exit 0' TERM; sleep 1000 & echo up; wait");
  ASSERT_TRUE(test::ComesTrue(
      [&] { return Log() == "up\n" || process->EndsWithin(absl::Milliseconds(5)); }));
  struct sigaction ignore = {};
  ignore.sa_handler = [](int) {};
  struct sigaction before = {};
  sigaction(SIGUSR1, &ignore, &before);
  std::atomic<bool> is_stopped = false;
  std::thread signals([&, waiting = pthread_self()] {
    while (!is_stopped) pthread_kill(waiting, SIGUSR1);
  });

  EXPECT_OK(process->Stop(kLong));

  is_stopped = true;
  signals.join();
  sigaction(SIGUSR1, &before, nullptr);
}

TEST_F(DaemonProcessTest, KillWaitsForNothing) {
  const auto process = Start("trap '' TERM; echo up; while :; do :; done");
  ASSERT_TRUE(test::ComesTrue(
      [&] { return Log() == "up\n" || process->EndsWithin(absl::Milliseconds(5)); }));

  process->Kill();

  EXPECT_TRUE(process->EndsWithin(kLong));
}

TEST_F(DaemonProcessTest, AnEndWithAnErrorIsNoCleanStop) {
  const auto process = Start("exit 4");
  ASSERT_TRUE(process->EndsWithin(kLong));

  EXPECT_THAT(process->Stop(kLong),
              StatusIs(StatusCode::kInternal, HasSubstr("ended with exit code 4")));
}

TEST_F(DaemonProcessTest, ALogThatCannotBeWrittenIsAnError) {
  EXPECT_THAT(DaemonProcess::Start(Shell("exit 0"), (folder_.path() / "no" / "log").string()),
              StatusIs(StatusCode::kInternal, HasSubstr("log file failed: No such file")));
}

}  // namespace
}  // namespace ebbtide::cli
