// SPDX-License-Identifier: Apache-2.0
//
// One sequence's calls, each checked against the run of the daemon that it belongs to.

#include "ebbtide/sequence.h"

#include <utility>

#include "base/status_macros.h"
#include "client/cpp/src/batch.h"
#include "client/cpp/src/convert.h"

namespace ebbtide::client {
namespace {

// A restarted daemon answers that it knows no such sequence; say why.
absl::Status Explain(Connection& connection, const Sequence& sequence, absl::Status status) {
  if (status.code() != absl::StatusCode::kNotFound) return status;
  v1::GetServerInfoResponse info;
  Attempts attempts = connection.ControlAttempts();
  if (!connection.Call(v1::GetServerInfoRequest(), &info, attempts).ok()) return status;
  connection.NoteBoot(info.boot_id());
  absl::Status boot = CheckBoot(connection, sequence, info.boot_id());
  return boot.ok() ? status : boot;
}

template <typename Request, typename Response>
absl::Status CallOfSequence(Connection& connection, const Sequence& sequence,
                            const Request& request, Response* response, Attempts attempts) {
  absl::Status status = connection.Call(request, response, attempts);
  if (!status.ok()) return Explain(connection, sequence, std::move(status));
  connection.NoteBoot(response->boot_id());
  return CheckBoot(connection, sequence, response->boot_id());
}

// A batch of one: the item's refusal is the call's.
template <typename Result>
absl::StatusOr<Result> OnlyResult(absl::StatusOr<std::vector<Result>> results) {
  EBBTIDE_RETURN_IF_ERROR(results.status());
  EBBTIDE_RETURN_IF_ERROR(results->front().status);
  return std::move(results->front());
}

}  // namespace

Sequence::Sequence(std::shared_ptr<Connection> connection, std::string name, std::string boot_id,
                   OpenedSequence opened)
    : connection_(std::move(connection)),
      name_(std::move(name)),
      boot_id_(std::move(boot_id)),
      opened_(std::move(opened)) {}

absl::StatusOr<AppendResult> Sequence::Append(const Step& step, AppendItem item) const {
  item.sequence = this;
  return OnlyResult(CallAppend(*connection_, step, {&item, 1}));
}

absl::StatusOr<AttendResult> Sequence::Attend(const Step& step, AttendItem item) const {
  item.sequence = this;
  return OnlyResult(CallAttend(*connection_, step, {&item, 1}));
}

absl::StatusOr<std::vector<Page>> Sequence::ReadPages(LaneId lane, uint64_t first_page,
                                                      uint64_t page_count) const {
  v1::ReadPagesRequest request;
  request.set_sequence(name_);
  request.set_layer(lane.layer);
  request.set_kv_head(lane.kv_head);
  request.set_first_page(first_page);
  request.set_page_count(page_count);
  v1::ReadPagesResponse response;
  EBBTIDE_RETURN_IF_ERROR(
      CallOfSequence(*connection_, *this, request, &response, connection_->DataAttempts()));
  std::vector<Page> pages;
  pages.reserve(static_cast<size_t>(response.pages_size()));
  for (v1::Page& page : *response.mutable_pages()) pages.push_back(FromWire(std::move(page)));
  return pages;
}

absl::StatusOr<uint64_t> Sequence::Truncate(uint64_t length) const {
  v1::TruncateRequest request;
  request.set_sequence(name_);
  request.set_length(length);
  v1::TruncateResponse response;
  EBBTIDE_RETURN_IF_ERROR(
      CallOfSequence(*connection_, *this, request, &response, connection_->DataAttempts()));
  return response.length();
}

absl::Status Sequence::Close() const {
  v1::CloseSequenceRequest request;
  request.set_sequence(name_);
  v1::CloseSequenceResponse response;
  absl::Status status =
      CallOfSequence(*connection_, *this, request, &response, connection_->PatientAttempts());
  if (!absl::IsCancelled(status)) return status;
  return CallOfSequence(*connection_, *this, request, &response, connection_->LeavingAttempts());
}

}  // namespace ebbtide::client
