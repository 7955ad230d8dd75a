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
#include "service/rpc/socket_claim.h"

namespace ebbtide::service {

class Listener {
 public:
  // Is given each connection, not blocking, to close it in the end. Called on one thread. One that
  // throws for want of memory is given the next; its connection is hung up, and not closed here.
  using Take = std::function<void(int connection)>;

  // Connections wait from the moment it returns.
  //   kFailedPrecondition  somebody listens there already (socket_claim.h)
  //   others               the system's own words
  static absl::StatusOr<std::unique_ptr<Listener>> Open(const ListenConfig& place);
  ~Listener();  // Closes it.

  // What clients dial: with the port that was free, where any was asked for.
  const ListenConfig& place() const { return place_; }

  // Once. A quarter of the process's descriptors is kept for its files: connections beyond are
  // closed at once. From then on a socket that was removed is made anew within a second.
  void Accept(Take take);

  // Nobody can connect any more. Removes the socket, unless somebody else's lies there.
  void Close();

  // Ends every connection that was made here: gRPC waits for ever to write to one whose client
  // reads no more. Once it is closed.
  void HangUp() const;

  // Whether clients can connect, and why not: not where the socket is gone and can't be had back,
  // nor where the newest connection was refused within five seconds.
  absl::Status status() const ABSL_LOCKS_EXCLUDED(mu_);

 private:
  explicit Listener(const ListenConfig& place);
  absl::StatusOr<int> BindSocket(const SocketClaim& claim);
  absl::Status BindPorts();
  absl::Status BindAddresses();
  void CloseSockets();
  bool IsSocketOurs() const;
  bool IsConnectionHere(int fd) const;
  void Run(const Take& take);
  void AcceptFrom(int socket, const Take& take);
  void HandOver(int connection, const Take& take);
  void RefuseForAWhile(const std::string& why) ABSL_LOCKS_EXCLUDED(mu_);
  void NoteRefused(const std::string& why) ABSL_LOCKS_EXCLUDED(mu_);
  void LookAfterSocket() ABSL_LOCKS_EXCLUDED(mu_);
  absl::Status ListenAnew();

  const int end_;  // Readable once it is over.
  ListenConfig place_;

  // Of the thread, while it runs.
  std::vector<int> sockets_;
  dev_t device_ = 0;  // With the inode it tells our socket from others at its path, while it is
  ino_t inode_ = 0;   // open: later the number may be another file's.
  int highest_ = -1;  // Of the connections' descriptors.

  mutable absl::Mutex mu_;
  absl::Status listening_ ABSL_GUARDED_BY(mu_);
  absl::Duration refused_at_ ABSL_GUARDED_BY(mu_) = -absl::InfiniteDuration();
  std::string why_refused_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace ebbtide::service
