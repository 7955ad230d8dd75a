// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/socket_claim.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::service {
namespace {

namespace fs = std::filesystem;
using test::IsOk;
using test::StatusIs;
using testing::AllOf;
using testing::HasSubstr;

// A socket bound at `path`, listening or not, as long as this lives. The file stays.
class BoundSocket {
 public:
  BoundSocket(const std::string& path, bool is_listening)
      : fd_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, sizeof address.sun_path - 1);
    EXPECT_EQ(::bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    if (is_listening) {
      EXPECT_EQ(::listen(fd_, 1), 0);
    }
  }
  ~BoundSocket() { ::close(fd_); }

 private:
  int fd_;
};

class SocketClaimTest : public testing::Test {
 protected:
  const test::TempFolder folder_;
  const std::string path_ = folder_.path() / "e.sock";
};

TEST_F(SocketClaimTest, FolderIsMadeForThisUserAlone) {
  const std::string folder = folder_.path() / "made";

  EXPECT_THAT(SocketClaim::Take(folder + "/e.sock"), IsOk());

  struct stat info = {};
  ASSERT_EQ(::stat(folder.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700);
}

TEST_F(SocketClaimTest, MissingParentIsNotMade) {
  EXPECT_THAT(SocketClaim::Take(folder_.path() / "a" / "b" / "e.sock"),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("can't make the socket's folder")));
}

TEST_F(SocketClaimTest, DeadSocketIsRemoved) {
  { const BoundSocket dead(path_, true); }
  ASSERT_TRUE(fs::exists(path_));

  EXPECT_THAT(SocketClaim::Take(path_), IsOk());

  EXPECT_FALSE(fs::exists(path_));
}

TEST_F(SocketClaimTest, LiveSocketIsLeftAndItsOwnerNamed) {
  const BoundSocket live(path_, true);

  EXPECT_THAT(SocketClaim::Take(path_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr(path_), HasSubstr(absl::StrFormat("process %d of uid %d",
                                                                         getpid(), geteuid())))));
  EXPECT_TRUE(fs::exists(path_));
}

TEST_F(SocketClaimTest, WhatIsNoSocketIsLeft) {
  std::ofstream(path_) << "precious";

  EXPECT_THAT(SocketClaim::Take(path_),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("is not a socket")));
  EXPECT_EQ(fs::file_size(path_), 8);
}

TEST_F(SocketClaimTest, LinkToASocketIsNotFollowed) {
  const std::string elsewhere = folder_.path() / "elsewhere";
  { const BoundSocket dead(elsewhere, true); }
  fs::create_symlink(elsewhere, path_);

  EXPECT_THAT(SocketClaim::Take(path_), StatusIs(absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(fs::exists(elsewhere));
}

TEST_F(SocketClaimTest, OnlyOneHasAClaimOnAFolder) {
  {
    const absl::StatusOr<SocketClaim> other = SocketClaim::Take(path_);
    ASSERT_THAT(other, IsOk());

    EXPECT_THAT(SocketClaim::TryTake(path_),
                StatusIs(absl::StatusCode::kUnavailable, HasSubstr(folder_.path().string())));
  }
  EXPECT_THAT(SocketClaim::TryTake(path_), IsOk());
}

TEST_F(SocketClaimTest, ModeIsSetOnTheSocket) {
  const absl::StatusOr<SocketClaim> claim = SocketClaim::Take(path_);
  ASSERT_THAT(claim, IsOk());
  const BoundSocket bound(path_, true);

  EXPECT_THAT(claim->SetMode(0660), IsOk());

  EXPECT_EQ(static_cast<unsigned>(fs::status(path_).permissions()), 0660U);
}

}  // namespace
}  // namespace ebbtide::service
