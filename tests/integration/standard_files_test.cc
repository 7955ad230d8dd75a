// SPDX-License-Identifier: Apache-2.0
//
// Real ebbtided processes whose standard files are closed, or pipes that nobody reads, and one
// whose disk hangs at the start: each serves as far as it can, and ends when it is asked to.

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/integration/daemon_stand.h"
#include "tests/support/grpc_probe.h"

namespace ebbtide {
namespace {

namespace fs = std::filesystem;
using test::DaemonProcess;
using testing::AllOf;
using testing::HasSubstr;

// A named pipe that this test holds open.
class NamedPipe {
 public:
  explicit NamedPipe(const std::string& path) {
    EXPECT_EQ(::mkfifo(path.c_str(), 0600), 0);
    fd_ = ::open(path.c_str(), O_RDWR | O_NONBLOCK | O_CLOEXEC);
    EXPECT_GE(fd_, 0);
  }
  ~NamedPipe() { ::close(fd_); }

  // What is written to it from now on waits until it is read.
  void Fill() const {
    const std::string block(4096, '\n');
    while (::write(fd_, block.data(), block.size()) > 0) {
    }
  }

  // Until what it read holds `end`, or nothing comes for thirty seconds.
  std::string ReadUntil(const std::string& end) const {
    std::string text;
    std::string bytes(4096, '\0');
    pollfd ready = {.fd = fd_, .events = POLLIN, .revents = 0};
    while (text.find(end) == std::string::npos && ::poll(&ready, 1, 30'000) == 1) {
      const ssize_t count = ::read(fd_, bytes.data(), bytes.size());
      if (count > 0) text.append(bytes, 0, static_cast<size_t>(count));
    }
    EXPECT_THAT(text, HasSubstr(end));
    return text;
  }

 private:
  int fd_ = -1;
};

class StandardFilesTest : public testing::Test {
 protected:
  // Started by a shell with `redirections`, as in "2>&-".
  std::unique_ptr<DaemonProcess> Start(const std::string& redirections) {
    return std::make_unique<DaemonProcess>(
        test::DaemonSetup{.program = "/bin/sh",
                          .arguments = {"-c", "exec \"$0\" --config \"$1\" " + redirections,
                                        EBBTIDED_PATH, stand_.WriteConfig(stand_.SmallConfig())},
                          .environment = {{"HOME", stand_.home()}},
                          .stderr_file = stand_.path("stderr")});
  }
  std::shared_ptr<grpc::Channel> Connect() {
    return test::ConnectTo("unix:" + stand_.path("e.sock"));
  }
  void ExpectServesAndEnds(DaemonProcess& daemon) {
    EXPECT_EQ(test::HealthOf(Connect(), ""), "SERVING");
    daemon.Signal(SIGTERM);
    EXPECT_EQ(daemon.WaitForEnd(), 0);
    EXPECT_FALSE(fs::exists(stand_.path("e.sock")));
  }
  std::string FileOf(const DaemonProcess& daemon, int fd) {
    std::error_code none;
    return fs::read_symlink("/proc/" + std::to_string(daemon.pid()) + "/fd/" + std::to_string(fd),
                            none);
  }

  const test::DaemonStand stand_;
};

TEST_F(StandardFilesTest, ClosedOnesAreNoFileOfTheDaemons) {
  for (const std::string closed : {"2>&-", "0<&- >&- 2>&-"}) {
    const auto daemon = Start(closed);
    ASSERT_EQ(test::HealthOf(Connect(), ""), "SERVING");

    EXPECT_EQ(FileOf(*daemon, STDERR_FILENO), "/dev/null") << closed;
    // gRPC takes standard input before main begins, for something that it never uses.
    if (closed.starts_with("0")) {
      EXPECT_EQ(FileOf(*daemon, STDOUT_FILENO), "/dev/null");
    }
    ExpectServesAndEnds(*daemon);
  }
}

TEST_F(StandardFilesTest, ControlProgramRunsWithoutThemButMissesItsOutput) {
  const auto run = [&](const std::string& closed) {
    DaemonProcess ebbctl({.program = "/bin/sh",
                          .arguments = {"-c", "exec \"$0\" --version " + closed, EBBCTL_PATH},
                          .environment = {},
                          .stderr_file = stand_.path("stderr")});
    return ebbctl.WaitForEnd();
  };
  EXPECT_EQ(run("0<&- 2>&-"), 0);
  EXPECT_EQ(run("0<&- >&-"), 1);
  EXPECT_THAT(stand_.Stderr(), HasSubstr("standard output did not take all of it"));
}

TEST_F(StandardFilesTest, BannerThatNobodyTakesHoldsUpNothing) {
  const NamedPipe pipe(stand_.path("pipe"));
  pipe.Fill();
  const auto daemon = Start(">" + stand_.path("pipe"));

  ExpectServesAndEnds(*daemon);

  EXPECT_THAT(stand_.Stderr(), HasSubstr("\"event\":\"stopped\""));
}

TEST_F(StandardFilesTest, LogThatNobodyReadsHoldsUpNothing) {
  const NamedPipe pipe(stand_.path("pipe"));
  pipe.Fill();
  const auto daemon = Start("2>" + stand_.path("pipe"));

  ExpectServesAndEnds(*daemon);
}

TEST_F(StandardFilesTest, LogGoesOnWhereItsReaderDoes) {
  const NamedPipe pipe(stand_.path("pipe"));
  pipe.Fill();
  const auto daemon = Start("2>" + stand_.path("pipe"));
  ASSERT_EQ(test::HealthOf(Connect(), ""), "SERVING");

  daemon->Signal(SIGTERM);

  EXPECT_THAT(pipe.ReadUntil("\"stopped\""), HasSubstr("\"event\":\"stopping\""));
  EXPECT_EQ(daemon->WaitForEnd(), 0);
}

// A pipe in the place of the lock file hangs whoever opens it, as a disk may.
class HangingStartTest : public StandardFilesTest {
 protected:
  HangingStartTest() {
    fs::create_directory(stand_.path("rocksdb"));
    EXPECT_EQ(::mkfifo(stand_.path("rocksdb/ebbtide.lock").c_str(), 0600), 0);
  }
};

TEST_F(HangingStartTest, SaysWhatItWaitsForAndEndsWhenAsked) {
  const NamedPipe log(stand_.path("pipe"));
  const auto daemon = Start("2>" + stand_.path("pipe"));

  EXPECT_THAT(log.ReadUntil("waited_seconds"),
              AllOf(HasSubstr("the start takes long"), HasSubstr("\"waits_for\":\"rocksdb.path\""),
                    HasSubstr(stand_.path("rocksdb"))));
  daemon->Signal(SIGINT);

  EXPECT_EQ(daemon->WaitForEnd(), 0);
  log.ReadUntil("stopped before it served");
}

TEST_F(HangingStartTest, SignalThatComesFirstEndsItToo) {
  const auto daemon = Start("");

  daemon->Signal(SIGTERM);

  // Before it masks signals they kill it.
  EXPECT_THAT(daemon->WaitForEnd(), testing::AnyOf(0, 128 + SIGTERM));
}

}  // namespace
}  // namespace ebbtide
