// SPDX-License-Identifier: Apache-2.0
//
// A worker's way to its daemon, over gRPC. Hides the wire: no gRPC or protobuf header is needed to
// use it. docs/worker.md says how a conversation goes.
//
//   auto client = ebbtide::client::Client::Connect();
//   client->RegisterModel({.name = "llama", .geometry = geometry});
//   auto sequence = client->OpenSequence({.name = "chat-17", .model = "llama", .budget = {1024}});
//   auto answer = sequence->Attend({.layer = 0}, {.first_index = 0, .q = q, .k = k, .v = v});

#pragma once

#include <memory>
#include <span>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

#include "ebbtide/sequence.h"
#include "ebbtide/types.h"

namespace ebbtide::client {

class Connection;

struct ClientOptions {
  absl::Duration connect_timeout = absl::Seconds(5);
  absl::Duration control_timeout = absl::Seconds(10);  // Of calls that carry names and numbers.
  absl::Duration data_timeout = absl::Seconds(60);     // Of calls that carry keys and values.
  int attempts_max = 4;  // Of one call, the first included; the time limit holds for all together.
  absl::Duration backoff_first = absl::Milliseconds(20);  // Before the second; doubles, up to 1 s.
  // Once a stop is asked for, calls under way end at once and no more are made. Who stops leaves in
  // order: Sequence::Close alone still is made, and an OpenSequence under way may still answer,
  // each within two seconds.
  std::stop_token stop = {};
};

// Where a daemon that was told nothing listens: $EBBTIDE_SOCKET, else
// unix:$XDG_RUNTIME_DIR/ebbtide.sock where that folder is there, else
// unix:/tmp/ebbtide-<uid>/ebbtide.sock.
std::string DefaultTarget();

// Thread-safe, movable. Every call has a deadline. A call whose answer was lost is sent again, same
// arguments, at most `attempts_max` times: each call of the protocol may be repeated. Errors:
//   kUnavailable       UNREACHABLE: nobody answers; names the endpoint, what stands there, the fix
//   kPermissionDenied  UNREACHABLE: the socket is closed to this user, or was not named and lies in
//                      a folder under /tmp that another user made
//   kDeadlineExceeded  time ran out; the call may or may not have been carried out, repeat it
//   kCancelled         a stop was asked for; the call may or may not have been carried out
//   kAborted           DAEMON_RESTARTED: a sequence of an earlier run of the daemon
//   kResourceExhausted MESSAGE_TOO_LARGE: the call passes the daemon's longest message
// and the daemon's own, code and reason as they came (ErrorReason).
class Client {
 public:
  // Connects and says hello. `target`: "unix:PATH" or "HOST:PORT"; empty: DefaultTarget().
  //   kInvalidArgument   not a target
  //   kUnavailable, kPermissionDenied  UNREACHABLE
  //   kUnimplemented, kDeadlineExceeded  who listens there is no ebbtided, or one that hangs
  static absl::StatusOr<Client> Connect(std::string_view target = {},
                                        const ClientOptions& options = {});

  const std::string& target() const;
  std::string boot_id() const;  // Of the daemon's run that answered last.

  absl::StatusOr<RegisteredModel> RegisterModel(const Model& model) const;
  // Answers with the sequence even after a stop, where the daemon does: it is there to be closed.
  //   kCancelled         a stop was asked for before it was sent, or sent again
  //   kDeadlineExceeded  no answer in time, nor in two seconds after a stop: it may be open
  absl::StatusOr<Sequence> OpenSequence(const SequenceOptions& options) const;

  // A step of a batch: one item per sequence, one result per item, in order. Ok as a whole even
  // where items were refused: look at each status.
  absl::StatusOr<std::vector<AppendResult>> Append(const Step& step,
                                                   std::span<const AppendItem> items) const;
  absl::StatusOr<std::vector<AttendResult>> Attend(const Step& step,
                                                   std::span<const AttendItem> items) const;

  absl::StatusOr<ServerInfo> GetServerInfo() const;
  absl::StatusOr<Stats> GetStats() const;
  absl::StatusOr<std::vector<SequenceSummary>> ListSequences() const;  // All, in order of name.

  // Tokens are listed between two calls of their layer: waits for that as long as
  // `control_timeout` allows.
  //   kUnavailable  CALL_IN_FLIGHT: it was being called at each look
  absl::StatusOr<SequenceDescription> DescribeSequence(const DescribeOptions& options) const;

 private:
  explicit Client(std::shared_ptr<Connection> connection);

  std::shared_ptr<Connection> connection_;
};

}  // namespace ebbtide::client
