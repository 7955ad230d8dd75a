// SPDX-License-Identifier: Apache-2.0
//
// Clients of a real listener: those that come when there is no descriptor for them, and those that
// find its socket gone.

#include "service/rpc/listener.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/comes_true.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"

namespace ebbtide::service {
namespace {

namespace fs = std::filesystem;
using test::ComesTrue;
using test::IsOk;
using test::StatusIs;
using testing::HasSubstr;

class ListenerTest : public testing::Test {
 protected:
  ListenerTest() { place_.socket_path = folder_.path() / "e.sock"; }
  ~ListenerTest() override {
    listener_.reset();
    CloseAll();
  }

  void Open() {
    absl::StatusOr<std::unique_ptr<Listener>> listener = Listener::Open(place_);
    ASSERT_THAT(listener, IsOk());
    listener_ = *std::move(listener);
    listener_->Accept([this](int connection) {
      const absl::MutexLock lock(&mu_);
      taken_.push_back(connection);
    });
  }

  size_t TakenCount() {
    const absl::MutexLock lock(&mu_);
    return taken_.size();
  }

  // A client; where it can't connect, -1.
  int Connect() {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    place_.socket_path.copy(address.sun_path, sizeof address.sun_path - 1);
    if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      ::close(fd);
      return -1;
    }
    clients_.push_back(fd);
    return fd;
  }
  bool IsTaken() {
    const size_t before = TakenCount();
    return Connect() >= 0 && ComesTrue([&] { return TakenCount() > before; });
  }

  void CloseAll() {
    const absl::MutexLock lock(&mu_);
    for (const int fd : clients_) ::close(fd);
    for (const int fd : taken_) ::close(fd);
    clients_.clear();
    taken_.clear();
  }

  const test::TempFolder folder_;
  ListenConfig place_;
  std::unique_ptr<Listener> listener_;
  std::vector<int> clients_;
  absl::Mutex mu_;
  std::vector<int> taken_ ABSL_GUARDED_BY(mu_);
};

// The process's limit on descriptors for as long as this lives.
class DescriptorLimit {
 public:
  explicit DescriptorLimit(rlim_t limit) {
    EXPECT_EQ(::getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit now = {.rlim_cur = limit, .rlim_max = before_.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &now), 0);
  }
  ~DescriptorLimit() { ::setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_ = {};
};

TEST_F(ListenerTest, GivesEachConnectionOn) {
  Open();

  EXPECT_TRUE(IsTaken());
  EXPECT_TRUE(IsTaken());
  EXPECT_THAT(listener_->Refresh(), IsOk());
}

TEST_F(ListenerTest, KeepsDescriptorsForFilesAndTakesConnectionsAgain) {
  Open();
  const DescriptorLimit limit(64);
  while (Connect() >= 0 && clients_.size() < 32) {
  }

  EXPECT_TRUE(ComesTrue([&] { return !listener_->Refresh().ok(); }));

  EXPECT_THAT(listener_->Refresh(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("in use")));
  {
    const absl::MutexLock lock(&mu_);
    EXPECT_THAT(taken_, testing::Each(testing::Lt(48)));
  }
  CloseAll();
  EXPECT_TRUE(IsTaken());
  EXPECT_THAT(listener_->Refresh(), IsOk());
}

TEST_F(ListenerTest, OutlivesThatThereIsNoDescriptorAtAll) {
  Open();
  const int client = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int file = ::dup(client);
  {
    const DescriptorLimit limit(static_cast<rlim_t>(file));
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    place_.socket_path.copy(address.sun_path, sizeof address.sun_path - 1);
    ASSERT_EQ(::connect(client, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);

    EXPECT_TRUE(ComesTrue([&] { return !listener_->Refresh().ok(); }));
    EXPECT_EQ(TakenCount(), 0U);
  }

  EXPECT_TRUE(ComesTrue([&] { return TakenCount() == 1; }));
  EXPECT_THAT(listener_->Refresh(), IsOk());
  ::close(client);
  ::close(file);
}

TEST_F(ListenerTest, ListensAnewWhereTheSocketWasRemoved) {
  place_.socket_mode = 0660;
  Open();
  fs::remove(place_.socket_path);
  ASSERT_EQ(Connect(), -1);

  EXPECT_THAT(listener_->Refresh(), IsOk());

  EXPECT_TRUE(IsTaken());
  EXPECT_EQ(static_cast<unsigned>(fs::status(place_.socket_path).permissions()), 0660U);
  listener_.reset();
  EXPECT_FALSE(fs::exists(place_.socket_path));
}

TEST_F(ListenerTest, LeavesASocketThatIsAnothers) {
  Open();
  fs::remove(place_.socket_path);
  absl::StatusOr<std::unique_ptr<Listener>> other = Listener::Open(place_);
  ASSERT_THAT(other, IsOk());

  EXPECT_THAT(listener_->Refresh(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("is listened at by")));

  listener_.reset();
  EXPECT_TRUE(fs::exists(place_.socket_path));
  other->reset();
  EXPECT_FALSE(fs::exists(place_.socket_path));
}

TEST_F(ListenerTest, TakesTheSocketBackWhereTheOtherIsGone) {
  Open();
  fs::remove(place_.socket_path);
  absl::StatusOr<std::unique_ptr<Listener>> other = Listener::Open(place_);
  ASSERT_THAT(other, IsOk());
  ASSERT_FALSE(listener_->Refresh().ok());
  other->reset();

  EXPECT_THAT(listener_->Refresh(), IsOk());

  EXPECT_TRUE(IsTaken());
}

TEST_F(ListenerTest, AnyPortIsTheSameAtEveryAddress) {
  place_ = {.socket_path = "", .host = "localhost", .port = 0};
  Open();

  EXPECT_GT(listener_->place().port, 0);
  EXPECT_THAT(Listener::Open(listener_->place()),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("in use")));
}

}  // namespace
}  // namespace ebbtide::service
