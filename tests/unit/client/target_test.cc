// SPDX-License-Identifier: Apache-2.0
//
// Endpoints as people write them, and the one that daemon and client agree on.

#include "client/cpp/src/target.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "gtest/gtest.h"

#include "ebbtide/client.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

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

  EXPECT_OK(CheckDefaultTarget(target));
  ASSERT_EQ(chown(folder.c_str(), 12345, 12345), 0);
  EXPECT_THAT(CheckDefaultTarget(target),
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("belongs to uid 12345")));
  ASSERT_EQ(rmdir(folder.c_str()), 0);
  EXPECT_OK(CheckDefaultTarget(target));
}

}  // namespace
}  // namespace ebbtide::client
