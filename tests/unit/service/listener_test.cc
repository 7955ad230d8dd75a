// SPDX-License-Identifier: Apache-2.0
//
// Clients of a real listener: those that come when there is no descriptor for them, those that
// find its socket gone, and those that are there when it ends.

#include "service/rpc/listener.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "service/config/listen.h"
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
      if (is_memory_short_.exchange(false)) throw std::bad_alloc();
    });
  }

  // Another's socket in the place of ours, at one stroke.
  std::unique_ptr<Listener> ReplaceSocket() {
    ListenConfig place = place_;
    place.socket_path = folder_.path() / "other.sock";
    absl::StatusOr<std::unique_ptr<Listener>> other = Listener::Open(place);
    EXPECT_THAT(other, IsOk());
    if (!other.ok()) return nullptr;
    fs::rename(place.socket_path, place_.socket_path);
    return *std::move(other);
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
  std::atomic<bool> is_memory_short_ = false;  // For the next connection that is taken.
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

unsigned ModeOf(const std::string& path) {
  struct stat info = {};
  return ::lstat(path.c_str(), &info) == 0 ? info.st_mode & 0777U : 0U;
}

std::string MaskOfThisProcess() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line) && !line.starts_with("Umask:")) {
  }
  return line;
}

// Whether no thread of that name has anything to do now; others inherit the name.
bool IsAsleep(const std::string& name) {
  bool is_asleep = true;
  for (const fs::directory_entry& task : fs::directory_iterator("/proc/self/task")) {
    std::string comm, stat;
    std::getline(std::ifstream(task.path() / "comm"), comm);
    std::getline(std::ifstream(task.path() / "stat"), stat);
    if (comm == name && stat.find(") S ") == std::string::npos) is_asleep = false;
  }
  return is_asleep;
}

TEST_F(ListenerTest, GivesEachConnectionOn) {
  Open();

  EXPECT_TRUE(IsTaken());
  EXPECT_TRUE(IsTaken());
  EXPECT_THAT(listener_->status(), IsOk());
}

// Its client would wait for ever. Who threw may have it all the same: closed twice, another's
// descriptor would be.
TEST_F(ListenerTest, HangsUpOnWhomNobodyTakesForWantOfMemoryAndClosesNothing) {
  is_memory_short_ = true;
  Open();
  const int client = Connect();

  pollfd end = {.fd = client, .events = POLLIN, .revents = 0};
  ASSERT_EQ(::poll(&end, 1, 30'000), 1);
  char byte = 0;
  EXPECT_EQ(::read(client, &byte, 1), 0);
  EXPECT_TRUE(ComesTrue([&] { return !listener_->status().ok(); }));
  EXPECT_THAT(listener_->status(),
              StatusIs(absl::StatusCode::kUnavailable, HasSubstr("no memory")));
  {
    const absl::MutexLock lock(&mu_);
    ASSERT_EQ(taken_.size(), 1U);
    EXPECT_EQ(::fcntl(taken_.front(), F_GETFD), FD_CLOEXEC);
  }
  EXPECT_TRUE(IsTaken());
  EXPECT_THAT(listener_->status(), IsOk());
}

TEST_F(ListenerTest, KeepsDescriptorsForFilesAndTakesConnectionsAgain) {
  Open();
  const DescriptorLimit limit(64);
  while (Connect() >= 0 && clients_.size() < 32) {
  }

  EXPECT_TRUE(ComesTrue([&] { return !listener_->status().ok(); }));

  EXPECT_THAT(listener_->status(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("in use")));
  {
    const absl::MutexLock lock(&mu_);
    EXPECT_THAT(taken_, testing::Each(testing::Lt(48)));
  }
  CloseAll();
  EXPECT_TRUE(IsTaken());
  EXPECT_THAT(listener_->status(), IsOk());
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

    EXPECT_TRUE(ComesTrue([&] { return !listener_->status().ok(); }));
    EXPECT_EQ(TakenCount(), 0U);
  }

  EXPECT_TRUE(ComesTrue([&] { return TakenCount() == 1; }));
  EXPECT_THAT(listener_->status(), IsOk());
  ::close(client);
  ::close(file);
}

TEST_F(ListenerTest, ListensAnewWhereTheSocketWasRemoved) {
  place_.socket_mode = 0660;
  Open();

  fs::remove(place_.socket_path);

  EXPECT_TRUE(ComesTrue([&] { return Connect() >= 0; }));
  EXPECT_TRUE(IsTaken());
  EXPECT_EQ(ModeOf(place_.socket_path), 0660U);
  EXPECT_THAT(listener_->status(), IsOk());
  listener_.reset();
  EXPECT_FALSE(fs::exists(place_.socket_path));
}

TEST_F(ListenerTest, RestsOnceItListensAnew) {
  Open();
  fs::remove(place_.socket_path);
  ASSERT_TRUE(ComesTrue([&] { return Connect() >= 0; }));
  ASSERT_TRUE(IsTaken());

  // One that finds something to do at each look may wait for a lock, but never sleeps on.
  int asleep = 0;
  EXPECT_TRUE(ComesTrue([&] {
    asleep = IsAsleep("ebbtide-accept") ? asleep + 1 : 0;
    return asleep == 1000;
  }));
}

TEST_F(ListenerTest, LeavesASocketThatIsAnothers) {
  Open();
  const std::unique_ptr<Listener> other = ReplaceSocket();

  EXPECT_TRUE(ComesTrue([&] { return !listener_->status().ok(); }));

  EXPECT_THAT(listener_->status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("is listened at by")));
  listener_.reset();
  EXPECT_GE(Connect(), 0);
}

TEST_F(ListenerTest, TakesTheSocketBackWhereTheOtherIsGone) {
  Open();
  std::unique_ptr<Listener> other = ReplaceSocket();
  ASSERT_TRUE(ComesTrue([&] { return !listener_->status().ok(); }));

  other.reset();

  EXPECT_TRUE(ComesTrue([&] { return listener_->status().ok(); }));
  EXPECT_TRUE(IsTaken());
}

// File systems give a number again: ext4 to the next file. Here it is surely the same.
TEST_F(ListenerTest, SocketThatComesOnceItIsClosedIsAnothersWhateverItsInode) {
  Open();
  const fs::path link = folder_.path() / "link";
  fs::create_hard_link(place_.socket_path, link);
  listener_->Close();
  ASSERT_FALSE(fs::exists(place_.socket_path));
  fs::rename(link, place_.socket_path);

  listener_.reset();

  EXPECT_TRUE(fs::exists(place_.socket_path));
}

// Whoever can open a folder can lock it, as anybody can /tmp.
TEST_F(ListenerTest, WaitsForNobodyWhoLocksTheFolder) {
  Open();
  const int folder = ::open(folder_.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_EQ(::flock(folder, LOCK_EX), 0);
  fs::remove(place_.socket_path);

  EXPECT_TRUE(ComesTrue([&] { return !listener_->status().ok(); }));

  EXPECT_THAT(listener_->status(), StatusIs(absl::StatusCode::kUnavailable, HasSubstr("locked")));
  ::close(folder);
  EXPECT_TRUE(ComesTrue([&] { return listener_->status().ok(); }));
  EXPECT_TRUE(IsTaken());
}

// The mask is the process's: changed for a socket, it would be other threads' too.
TEST_F(ListenerTest, SocketIsNeverOpenToOthersAndTheMaskStays) {
  const mode_t mask = ::umask(0);
  std::atomic<bool> is_over = false;
  std::atomic<int> seen = 0;
  unsigned modes = 0;
  std::set<std::string> masks;
  std::thread watcher([&] {
    while (!is_over) {
      const unsigned mode = ModeOf(place_.socket_path);
      modes |= mode;
      if (mode != 0) ++seen;
      masks.insert(MaskOfThisProcess());
    }
  });

  EXPECT_TRUE(ComesTrue([&] {
    for (int i = 0; i < 100; ++i) EXPECT_THAT(Listener::Open(place_), IsOk());
    return seen > 600;
  }));

  is_over = true;
  watcher.join();
  ::umask(mask);
  EXPECT_EQ(modes, 0600U);
  EXPECT_THAT(masks, testing::ElementsAre("Umask:\t0000"));
}

TEST_F(ListenerTest, HangsUpThoughThereIsNoDescriptor) {
  Open();
  ASSERT_TRUE(IsTaken());
  listener_->Close();
  const int client = clients_.front();
  const int free = ::dup(client);
  ::close(free);
  {
    const DescriptorLimit limit(static_cast<rlim_t>(free));
    ASSERT_EQ(::dup(client), -1);

    listener_->HangUp();
  }

  pollfd end = {.fd = client, .events = POLLIN, .revents = 0};
  ASSERT_EQ(::poll(&end, 1, 30'000), 1);
  char byte = 0;
  EXPECT_EQ(::read(client, &byte, 1), 0);
}

ListenConfig PortOf(const char* host, uint16_t port) {
  return {.socket_path = "", .host = host, .port = port};
}

bool HasIpv6() {
  return Listener::Open(PortOf("::1", 0)).ok();
}

TEST_F(ListenerTest, AnyPortIsTheSameAtEveryAddress) {
  place_ = PortOf("localhost", 0);
  Open();

  const uint16_t port = listener_->place().port;
  EXPECT_GT(port, 0);
  for (const char* host : {"127.0.0.1", "::1"}) {
    if (host == std::string("::1") && !HasIpv6()) continue;
    EXPECT_THAT(Listener::Open(PortOf(host, port)),
                StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("in use")))
        << host;
  }
}

// Half a localhost would send some clients to somebody else.
TEST_F(ListenerTest, LocalhostNeedsThePortAtEveryAddress) {
  for (const char* host : {"127.0.0.1", "::1"}) {
    if (host == std::string("::1") && !HasIpv6()) GTEST_SKIP() << "this machine has no IPv6";
    const absl::StatusOr<std::unique_ptr<Listener>> other = Listener::Open(PortOf(host, 0));
    ASSERT_THAT(other, IsOk());
    const ListenConfig place = (*other)->place();

    EXPECT_THAT(Listener::Open(PortOf("localhost", place.port)),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         testing::AllOf(HasSubstr(FormatListen(place)), HasSubstr("in use"))));
  }
}

// With so many in use, one in twenty that is free at one address is not at the other.
TEST_F(ListenerTest, AnyPortIsOneThatIsFreeAtEveryAddress) {
  if (!HasIpv6()) GTEST_SKIP() << "this machine has no IPv6";
  std::vector<std::unique_ptr<Listener>> others;
  const DescriptorLimit limit(2048);
  for (int i = 0; i < 800; ++i) {
    absl::StatusOr<std::unique_ptr<Listener>> other = Listener::Open(PortOf("::1", 0));
    ASSERT_THAT(other, IsOk());
    others.push_back(*std::move(other));
  }

  for (int i = 0; i < 300; ++i) {
    ASSERT_THAT(Listener::Open(PortOf("localhost", 0)), IsOk());
  }
}

}  // namespace
}  // namespace ebbtide::service
