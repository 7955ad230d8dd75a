// SPDX-License-Identifier: Apache-2.0
//
// Endpoints as people write them, and the one that daemon and client agree on.

#include "client/cpp/src/target.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>

#include "gtest/gtest.h"

#include "ebbtide/client.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"
#include "tests/unit/client/fake_daemon.h"

namespace ebbtide::client {
namespace {

using test::IsOkAndHolds;
using test::StatusIs;
using testing::HasSubstr;

// Sets a variable of the environment for as long as it lives.
class ScopedEnv {
 public:
  ScopedEnv(const char* name, const char* value) : name_(name) {
    if (const char* old = std::getenv(name)) old_ = old;
    had_ = std::getenv(name) != nullptr;
    value == nullptr ? unsetenv(name) : setenv(name, value, 1);
  }
  ~ScopedEnv() { had_ ? setenv(name_, old_.c_str(), 1) : unsetenv(name_); }

 private:
  const char* name_;
  std::string old_;
  bool had_ = false;
};

TEST(ParseTargetTest, TakesUnixPathsAndHostsWithPorts) {
  EXPECT_THAT(ParseTarget("unix:/run/ebbtide.sock"), IsOkAndHolds("unix:/run/ebbtide.sock"));
  EXPECT_THAT(ParseTarget("/run/ebbtide.sock"), IsOkAndHolds("unix:/run/ebbtide.sock"));
  EXPECT_THAT(ParseTarget("127.0.0.1:7070"), IsOkAndHolds("127.0.0.1:7070"));
  EXPECT_THAT(ParseTarget("[::1]:7070"), IsOkAndHolds("[::1]:7070"));
}

TEST(ParseTargetTest, RefusesWhatIsNoEndpoint) {
  for (const char* text :
       {"", "host", "host:", ":7070", "host:0", "host:65536", "host:x", "unix:"}) {
    EXPECT_THAT(ParseTarget(text), StatusIs(absl::StatusCode::kInvalidArgument)) << text;
  }
}

TEST(ParseTargetTest, RefusesASocketPathThatGrpcWouldReadAsAnother) {
  for (const char* sign : {"%", ",", "?", "#", " ", "\xc3\xbc"}) {
    EXPECT_THAT(ParseTarget(std::string("unix:/run/a") + sign + ".sock"),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("gRPC can't connect")))
        << sign;
  }
  EXPECT_OK(ParseTarget("unix:/run/a-._~!$&'()*+;=:@/Z9.sock"));
}

TEST(ParseTargetTest, RefusesASocketPathThatTheSystemCannotHold) {
  EXPECT_THAT(ParseTarget("unix:/" + std::string(107, 'a')),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("has 108 bytes; 1 to 107")));
  EXPECT_OK(ParseTarget("unix:/" + std::string(106, 'a')));
}

TEST(DefaultTargetTest, TheVariableWinsOverTheRunFolder) {
  const ScopedEnv socket("EBBTIDE_SOCKET", "unix:/a.sock");
  const ScopedEnv run("XDG_RUNTIME_DIR", "/run/user/7");

  EXPECT_EQ(DefaultTarget(), "unix:/a.sock");
}

TEST(DefaultTargetTest, AnEmptyVariableIsNone) {
  const test::TempFolder folder;
  const ScopedEnv socket("EBBTIDE_SOCKET", "");
  const ScopedEnv run("XDG_RUNTIME_DIR", folder.path().c_str());

  EXPECT_EQ(DefaultTarget(), "unix:" + folder.path().string() + "/ebbtide.sock");
}

// The daemon listens there too, or the two would miss each other.
TEST(DefaultTargetTest, WithoutARunFolderTheUsersOwnUnderTmpIsTaken) {
  const ScopedEnv socket("EBBTIDE_SOCKET", nullptr);
  const test::TempFolder folder;
  const std::string gone = (folder.path() / "gone").string();
  for (const char* value : {static_cast<const char*>(nullptr), "", ".", gone.c_str()}) {
    const ScopedEnv run("XDG_RUNTIME_DIR", value);

    EXPECT_EQ(DefaultTarget(), "unix:/tmp/ebbtide-" + std::to_string(geteuid()) + "/ebbtide.sock");
  }
}

TEST(DefaultTargetTest, AFolderUnderTmpThatAnotherUserMadeIsNotTrusted) {
  if (geteuid() != 0) GTEST_SKIP() << "not run: only root can give a folder to another user";
  std::string folder = "/tmp/ebbtide-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string target = "unix:" + folder + "/ebbtide.sock";

  ASSERT_EQ(chown(folder.c_str(), 12345, 12345), 0);
  for (const Asked asked : {Asked::kNobodyYet, Asked::kAndAnswered}) {
    EXPECT_THAT(CheckDefaultTarget(target, asked),
                StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("belongs to uid 12345")));
  }
  EXPECT_EQ(rmdir(folder.c_str()), 0);
}

TEST(DefaultTargetTest, AFolderUnderTmpIsToBeThereOnceSomebodyAnswered) {
  std::string folder = "/tmp/ebbtide-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string target = "unix:" + folder + "/ebbtide.sock";

  EXPECT_OK(CheckDefaultTarget(target, Asked::kNobodyYet));
  EXPECT_OK(CheckDefaultTarget(target, Asked::kAndAnswered));

  ASSERT_EQ(rmdir(folder.c_str()), 0);
  EXPECT_OK(CheckDefaultTarget(target, Asked::kNobodyYet));
  EXPECT_THAT(CheckDefaultTarget(target, Asked::kAndAnswered),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("No such file")));
}

// Whoever made it can take it away as soon as it is connected to.
TEST(DefaultTargetTest, ADaemonWhoseFolderUnderTmpGoesBeforeItAnswersIsNotTrusted) {
  std::string folder = "/tmp/ebbtide-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  FakeDaemon daemon(folder + "/ebbtide.sock");
  const ScopedEnv socket("EBBTIDE_SOCKET", daemon.target().c_str());
  EXPECT_OK(Client::Connect(""));
  daemon.FallSilent();
  std::thread remover([&] {
    daemon.AwaitCalls("GetServerInfo", 2);
    std::filesystem::remove_all(folder);
    daemon.Speak();
  });

  const absl::Status status = Client::Connect("").status();

  remover.join();
  EXPECT_THAT(status, StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr(daemon.target())));
  EXPECT_EQ(ErrorReason(status), "UNREACHABLE");
}

}  // namespace
}  // namespace ebbtide::client
