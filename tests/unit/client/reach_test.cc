// SPDX-License-Identifier: Apache-2.0
//
// What people are told where no daemon answers: no socket, one that is dead, one that is closed to
// them, somebody else's.

#include "client/cpp/src/reach.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "base/status_macros.h"
#include "ebbtide/client.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"
#include "tests/unit/client/fake_daemon.h"

namespace ebbtide::client {
namespace {

using absl::StatusCode;
using test::StatusIs;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr int kUnimplemented = 12;  // gRPC's number.

int Bind(const std::string& path, int kind) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::copy(path.begin(), path.end(), address.sun_path);
  const int fd = socket(AF_UNIX, kind | SOCK_CLOEXEC, 0);
  EBBTIDE_CHECK(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0,
                "the test may have a socket in its own folder");
  return fd;
}

int Listen(const std::string& path) {
  const int fd = Bind(path, SOCK_STREAM);
  EBBTIDE_CHECK(listen(fd, 8) == 0, "the test may listen in its own folder");
  return fd;
}

// Answers whoever connects as a web server would.
class WebServer {
 public:
  explicit WebServer(const std::string& path) : fd_(Listen(path)), thread_([this] { Serve(); }) {}
  ~WebServer() {
    shutdown(fd_, SHUT_RDWR);  // Ends accept.
    thread_.join();
    close(fd_);
  }

 private:
  void Serve() const {
    constexpr std::string_view kAnswer = "HTTP/1.1 400 Bad Request\r\n\r\n";
    std::array<char, 1024> request;
    for (int peer = 0; (peer = accept(fd_, nullptr, nullptr)) >= 0; close(peer)) {
      if (read(peer, request.data(), request.size()) <= 0) continue;
      static_cast<void>(send(peer, kAnswer.data(), kAnswer.size(), MSG_NOSIGNAL));
    }
  }

  const int fd_;
  std::thread thread_;
};

// Another user than root for as long as it lives: to root nothing is closed.
class AsNobody {
 public:
  AsNobody() : is_root_(geteuid() == 0) {
    if (is_root_) EBBTIDE_CHECK(seteuid(65534) == 0, "root may be nobody");
  }
  ~AsNobody() {
    if (is_root_) EBBTIDE_CHECK(seteuid(0) == 0, "nobody was root");
  }

 private:
  const bool is_root_;
};

class ReachTest : public testing::Test {
 protected:
  absl::Status Connect() const { return Client::Connect(target_).status(); }

  test::TempFolder folder_;
  const std::string path_ = (folder_.path() / "s").string();
  const std::string target_ = "unix:" + path_;
};

TEST_F(ReachTest, ASocketThatIsNotThereIsSaidSo) {
  const absl::Status status = Connect();

  EXPECT_THAT(status,
              StatusIs(StatusCode::kUnavailable,
                       "no daemon answers at " + target_ +
                           ": there is no such socket; start `ebbtided`, or name its endpoint with "
                           "EBBTIDE_SOCKET or --socket"));
  EXPECT_EQ(ErrorReason(status), "UNREACHABLE");
}

TEST_F(ReachTest, ASocketThatItsDaemonLeftBehindIsToldFromNone) {
  close(Listen(path_));

  EXPECT_THAT(Connect(), StatusIs(StatusCode::kUnavailable,
                                  HasSubstr(": nobody listens at that socket any more; start")));
}

TEST_F(ReachTest, AFileIsNoSocket) {
  std::ofstream(path_) << "text";

  EXPECT_THAT(Connect(), StatusIs(StatusCode::kUnavailable, HasSubstr(": that is no socket; ")));
}

TEST_F(ReachTest, WhereNobodyCanListenNobodyIsSaidToListen) {
  std::filesystem::create_symlink(path_, path_);
  EXPECT_THAT(Connect(),
              StatusIs(StatusCode::kUnavailable,
                       HasSubstr(": it can't be looked at: Too many levels of symbolic links; ")));

  std::filesystem::remove(path_);
  const int fd = Bind(path_, SOCK_DGRAM);
  EXPECT_THAT(Connect(),
              StatusIs(StatusCode::kUnavailable,
                       HasSubstr(": it can't be looked at: Protocol wrong type for socket; ")));
  close(fd);
}

TEST_F(ReachTest, ASocketThatIsClosedToTheUserNamesBothUsersAndTheWayIn) {
  const FakeDaemon daemon(path_);
  ASSERT_EQ(chmod(folder_.path().c_str(), 0755), 0);
  ASSERT_EQ(chmod(path_.c_str(), 0), 0);
  const std::string owner = std::to_string(geteuid());
  const AsNobody nobody;

  const absl::Status status = Connect();

  EXPECT_THAT(status,
              StatusIs(StatusCode::kPermissionDenied,
                       AllOf(HasSubstr("(uid " + std::to_string(geteuid()) + ")"),
                             HasSubstr("socket of uid " + owner + " with mode 0000"),
                             HasSubstr("server.socket_mode"), Not(HasSubstr("no daemon")))));
  EXPECT_EQ(ErrorReason(status), "UNREACHABLE");
}

TEST_F(ReachTest, AFolderThatIsClosedToTheUserIsSaidSo) {
  const FakeDaemon daemon(path_);
  ASSERT_EQ(chmod(folder_.path().c_str(), 0), 0);
  {
    const AsNobody nobody;
    EXPECT_THAT(Connect(), StatusIs(StatusCode::kPermissionDenied,
                                    HasSubstr("look into the socket's folder")));
  }
  ASSERT_EQ(chmod(folder_.path().c_str(), 0700), 0);
}

TEST_F(ReachTest, SomebodyElseIsNotTakenForADaemon) {
  const WebServer server(path_);

  EXPECT_THAT(Connect(), StatusIs(StatusCode::kUnavailable,
                                  AllOf(StartsWith("no daemon answers at " + target_),
                                        HasSubstr("who listens there is no ebbtided"),
                                        HasSubstr("http1.x"), Not(HasSubstr("start `ebbtided`")))));
}

TEST_F(ReachTest, AnotherGrpcServerIsNotTakenForADaemon) {
  FakeDaemon daemon(path_);
  daemon.RefuseNext(kUnimplemented, "", "unknown service");

  EXPECT_THAT(Connect(),
              StatusIs(StatusCode::kUnimplemented, HasSubstr("who listens there is no ebbtided")));
}

TEST_F(ReachTest, WhoSaysNothingIsNotTakenForADaemon) {
  FakeDaemon daemon(path_);
  daemon.FallSilent();

  EXPECT_THAT(Client::Connect(target_, {.connect_timeout = absl::Milliseconds(50)}).status(),
              StatusIs(StatusCode::kDeadlineExceeded, HasSubstr("or one that hangs")));
}

TEST_F(ReachTest, APortAtWhichNobodyListensAndAHostThatIsNoneAreToldApart) {
  EXPECT_THAT(Client::Connect("127.0.0.1:1").status(),
              StatusIs(StatusCode::kUnavailable,
                       HasSubstr("no daemon answers at 127.0.0.1:1: nobody listens there; start")));
  EXPECT_THAT(WhyUnreachable({.call = "GetServerInfo",
                              .target = "nosuch.invalid:1",
                              .said = "DNS resolution failed for nosuch.invalid:1: not found",
                              .is_first = true}),
              StatusIs(StatusCode::kUnavailable, HasSubstr(": there is no such host; start")));
}

TEST_F(ReachTest, ADaemonThatEndsLaterIsNotSomebodyElse) {
  FakeDaemon daemon(path_);
  ASSERT_OK_AND_ASSIGN(const Client client, Client::Connect(target_));
  daemon.LoseAnswers(100);

  EXPECT_THAT(client.GetServerInfo(),
              StatusIs(StatusCode::kUnavailable,
                       StartsWith("GetServerInfo: no daemon answers at " + target_ +
                                  ": it ended, or the connection broke (Socket closed); start")));
}

}  // namespace
}  // namespace ebbtide::client
