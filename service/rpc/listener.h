// SPDX-License-Identifier: Apache-2.0
//
// The place where clients connect. gRPC 1.51 can listen too, but for good ends to accept at the
// first connection that finds no descriptor free, and unlinks whatever lies at its socket's path
// when it goes. Tested by tests/unit/service/listener_test.cc.

#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

#include "service/config/config.h"

namespace ebbtide::service {

class Listener {
 public:
  // Is given each connection, not blocking, to close it in the end. Called on one thread.
  using Take = std::function<void(int connection)>;

  // Connections wait from the moment it returns.
  //   kFailedPrecondition  somebody listens there already (socket_claim.h)
  //   others               the system's own words
  static absl::StatusOr<std::unique_ptr<Listener>> Open(const ListenConfig& place);
  ~Listener();  // Closes it.

  // What clients dial: with the port that was free, where any was asked for.
  const ListenConfig& place() const { return place_; }

  // Once. A quarter of the process's descriptors is kept for its files: connections beyond are
  // closed at once.
  void Accept(Take take);

  // Nobody can connect any more. Removes the socket, unless somebody else's lies there.
  void Close() ABSL_LOCKS_EXCLUDED(mu_);

  // Ends every connection that was made here: gRPC waits for ever to write to one whose client
  // reads no more.
  void HangUp() const;

  // Whether clients can connect, and why not: not where the newest connection was refused within
  // five seconds. Listens anew where the socket was removed. Called now and then, by one thread.
  absl::Status Refresh() ABSL_LOCKS_EXCLUDED(mu_);

 private:
  explicit Listener(const ListenConfig& place);
  absl::StatusOr<int> BindSocket();
  absl::Status BindPorts();
  bool IsSocketOurs() const;
  bool IsConnectionHere(int fd) const;
  void Run(const Take& take);
  void AcceptFrom(int socket, const Take& take);
  void NoteRefused(const std::string& why) ABSL_LOCKS_EXCLUDED(mu_);
  void Wake() const;

  ListenConfig place_;
  dev_t device_ = 0;  // With the inode it tells our socket from others at its path.
  ino_t inode_ = 0;
  const int wake_;
  std::vector<int> sockets_;  // Of the thread, once it runs.
  absl::Mutex mu_;
  int next_socket_ ABSL_GUARDED_BY(mu_) = -1;  // Takes the place of the others.
  bool is_over_ ABSL_GUARDED_BY(mu_) = false;
  absl::Duration refused_at_ ABSL_GUARDED_BY(mu_) = -absl::InfiniteDuration();
  std::string why_refused_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace ebbtide::service
