// SPDX-License-Identifier: Apache-2.0
//
// The wire: one channel to one daemon, its calls with deadlines and repeated attempts, and which
// run of the daemon answered. Speaks protobuf, steps as bytes; gRPC itself stays in connection.cc.
// Contract: tests/unit/client/client_test.cc.

#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"

#include "client/cpp/src/encode.h"
#include "client/cpp/src/retry.h"
#include "client/cpp/src/send_buffers.h"
#include "ebbtide/client.h"

namespace ebbtide::v1 {
class RegisterModelRequest;
class RegisterModelResponse;
class OpenSequenceRequest;
class OpenSequenceResponse;
class AppendResponse;
class AttendResponse;
class ReadPagesRequest;
class ReadPagesResponse;
class TruncateRequest;
class TruncateResponse;
class CloseSequenceRequest;
class CloseSequenceResponse;
class GetServerInfoRequest;
class GetServerInfoResponse;
class GetStatsRequest;
class GetStatsResponse;
class ListSequencesRequest;
class ListSequencesResponse;
class DescribeSequenceRequest;
class DescribeSequenceResponse;
}  // namespace ebbtide::v1

namespace ebbtide::client {

inline constexpr std::string_view kReasonRestarted = "DAEMON_RESTARTED";
inline constexpr std::string_view kReasonUnreachable = "UNREACHABLE";
inline constexpr std::string_view kReasonTooLarge = "MESSAGE_TOO_LARGE";
inline constexpr std::string_view kReasonInFlight = "CALL_IN_FLIGHT";
inline constexpr std::string_view kReasonNotMet = "NOT_MET";

// `status` with a reason that ErrorReason gives back; unchanged where it is ok or has none.
absl::Status WithReason(absl::Status status, std::string_view reason);

// Thread-safe. Each call is sent again while its answer is lost, as `attempts` allows.
class Connection {
 public:
  // `target` as ParseTarget answers it.
  static std::shared_ptr<Connection> Open(std::string target, const ClientOptions& options);
  ~Connection();

  const std::string& target() const;
  std::string boot_id() const;

  // Takes note of the run that answered.
  void NoteBoot(std::string_view boot_id);

  // A message larger than this is refused here, with both numbers; 0: not known yet.
  void LimitMessages(uint64_t message_bytes_max);

  // For Encode.
  SendBuffers& send_buffers();

  Attempts ConnectAttempts() const;
  Attempts ControlAttempts() const;
  Attempts DataAttempts() const;

  // As ControlAttempts, but waits for calls in flight to end, however often it has to look.
  Attempts PatientAttempts() const;

  // For the one call that is still made once a stop was asked for.
  Attempts LeavingAttempts() const;

  absl::Status Call(const v1::RegisterModelRequest& request, v1::RegisterModelResponse* response,
                    Attempts& attempts) const;
  absl::Status Call(const v1::OpenSequenceRequest& request, v1::OpenSequenceResponse* response,
                    Attempts& attempts) const;
  absl::Status Call(const Encoded& request, v1::AppendResponse* response, Attempts& attempts) const;
  absl::Status Call(const Encoded& request, v1::AttendResponse* response, Attempts& attempts) const;
  absl::Status Call(const v1::ReadPagesRequest& request, v1::ReadPagesResponse* response,
                    Attempts& attempts) const;
  absl::Status Call(const v1::TruncateRequest& request, v1::TruncateResponse* response,
                    Attempts& attempts) const;
  absl::Status Call(const v1::CloseSequenceRequest& request, v1::CloseSequenceResponse* response,
                    Attempts& attempts) const;
  absl::Status Call(const v1::GetServerInfoRequest& request, v1::GetServerInfoResponse* response,
                    Attempts& attempts) const;
  absl::Status Call(const v1::GetStatsRequest& request, v1::GetStatsResponse* response,
                    Attempts& attempts) const;
  absl::Status Call(const v1::ListSequencesRequest& request, v1::ListSequencesResponse* response,
                    Attempts& attempts) const;
  absl::Status Call(const v1::DescribeSequenceRequest& request,
                    v1::DescribeSequenceResponse* response, Attempts& attempts) const;

 private:
  struct Wire;
  explicit Connection(std::unique_ptr<Wire> wire);

  const std::unique_ptr<Wire> wire_;
};

}  // namespace ebbtide::client
