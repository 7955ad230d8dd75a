// SPDX-License-Identifier: Apache-2.0
//
// The client's calls: plain values in, one message each way, plain values out.

#include "ebbtide/client.h"

#include <utility>

#include "absl/strings/str_format.h"

#include "base/status_macros.h"
#include "client/cpp/src/batch.h"
#include "client/cpp/src/connection.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/target.h"

namespace ebbtide::client {
namespace {

constexpr uint32_t kListPageSize = 1000;  // What ListSequences allows.

}  // namespace

Client::Client(std::shared_ptr<Connection> connection) : connection_(std::move(connection)) {}

absl::StatusOr<Client> Client::Connect(std::string_view target, const ClientOptions& options) {
  EBBTIDE_ASSIGN_OR_RETURN(std::string endpoint,
                           ParseTarget(target.empty() ? DefaultTarget() : std::string(target)));
  const auto connection = Connection::Open(std::move(endpoint), options);
  const auto check_owner = [&](Asked asked) -> absl::Status {
    if (!target.empty()) return absl::OkStatus();
    return WithReason(CheckDefaultTarget(connection->target(), asked), kReasonUnreachable);
  };
  EBBTIDE_RETURN_IF_ERROR(check_owner(Asked::kNobodyYet));
  v1::GetServerInfoResponse info;
  Attempts attempts = connection->ConnectAttempts();
  EBBTIDE_RETURN_IF_ERROR(connection->Call(v1::GetServerInfoRequest(), &info, attempts));
  // The folder may have been made meanwhile.
  EBBTIDE_RETURN_IF_ERROR(check_owner(Asked::kAndAnswered));
  connection->NoteBoot(info.boot_id());
  connection->LimitMessages(info.message_bytes_max());
  return Client(connection);
}

const std::string& Client::target() const {
  return connection_->target();
}
std::string Client::boot_id() const {
  return connection_->boot_id();
}

absl::StatusOr<RegisteredModel> Client::RegisterModel(const Model& model) const {
  v1::RegisterModelResponse response;
  Attempts attempts = connection_->ControlAttempts();
  EBBTIDE_RETURN_IF_ERROR(connection_->Call(ToWire(model), &response, attempts));
  connection_->NoteBoot(response.boot_id());
  return FromWire(response);
}

absl::StatusOr<Sequence> Client::OpenSequence(const SequenceOptions& options) const {
  v1::OpenSequenceResponse response;
  Attempts attempts = connection_->ControlAttempts();
  EBBTIDE_RETURN_IF_ERROR(connection_->Call(ToWire(options), &response, attempts));
  connection_->NoteBoot(response.boot_id());
  return Sequence(connection_, options.name, response.boot_id(), FromWire(response));
}

absl::StatusOr<std::vector<AppendResult>> Client::Append(const Step& step,
                                                         std::span<const AppendItem> items) const {
  return CallAppend(*connection_, step, items);
}

absl::StatusOr<std::vector<AttendResult>> Client::Attend(const Step& step,
                                                         std::span<const AttendItem> items) const {
  return CallAttend(*connection_, step, items);
}

absl::StatusOr<ServerInfo> Client::GetServerInfo() const {
  v1::GetServerInfoResponse response;
  Attempts attempts = connection_->ControlAttempts();
  EBBTIDE_RETURN_IF_ERROR(connection_->Call(v1::GetServerInfoRequest(), &response, attempts));
  connection_->NoteBoot(response.boot_id());
  connection_->LimitMessages(response.message_bytes_max());
  return FromWire(response);
}

absl::StatusOr<Stats> Client::GetStats() const {
  v1::GetStatsResponse response;
  Attempts attempts = connection_->ControlAttempts();
  EBBTIDE_RETURN_IF_ERROR(connection_->Call(v1::GetStatsRequest(), &response, attempts));
  return FromWire(response);
}

absl::StatusOr<std::vector<SequenceSummary>> Client::ListSequences() const {
  v1::ListSequencesRequest request;
  request.set_page_size(kListPageSize);
  std::vector<SequenceSummary> sequences;
  do {
    v1::ListSequencesResponse response;
    Attempts attempts = connection_->ControlAttempts();
    EBBTIDE_RETURN_IF_ERROR(connection_->Call(request, &response, attempts));
    for (const v1::SequenceSummary& sequence : response.sequences()) {
      sequences.push_back(FromWire(sequence));
    }
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());
  return sequences;
}

absl::StatusOr<SequenceDescription> Client::DescribeSequence(const DescribeOptions& options) const {
  v1::DescribeSequenceRequest request;
  request.set_sequence(options.sequence);
  request.set_with_lanes(options.with_lanes);
  request.set_with_tokens(options.tokens_of.has_value());
  if (options.tokens_of.has_value()) {
    request.set_layer(options.tokens_of->layer);
    request.set_kv_head(options.tokens_of->kv_head);
  }
  v1::DescribeSequenceResponse response;
  Attempts attempts = connection_->PatientAttempts();
  absl::Status status = connection_->Call(request, &response, attempts);
  const bool ran_out_of_looks = absl::IsDeadlineExceeded(status) && attempts.looks() > 1;
  if (ErrorReason(status) == kReasonInFlight || ran_out_of_looks) {
    return WithReason(
        absl::UnavailableError(absl::StrFormat(
            "sequence \"%s\": layer %u was being called at each of %d looks; its tokens are listed "
            "between two calls, so ask again when its worker rests",
            options.sequence, request.layer(), attempts.looks())),
        kReasonInFlight);
  }
  EBBTIDE_RETURN_IF_ERROR(status);
  return FromWire(response);
}

}  // namespace ebbtide::client
