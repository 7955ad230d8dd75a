// SPDX-License-Identifier: Apache-2.0
//
// Append and Attend differ in their messages alone, so both are one template.

#include "client/cpp/src/batch.h"

#include <utility>

#include "absl/strings/str_format.h"

#include "base/status_macros.h"
#include "client/cpp/src/convert.h"
#include "client/cpp/src/encode.h"

namespace ebbtide::client {
namespace {

template <typename Response>
absl::Status CheckCount(const Connection& connection, const Response& response, int items) {
  if (response.results_size() == items) return absl::OkStatus();
  return absl::InternalError(absl::StrFormat(
      "%s: the daemon at %s answered %d results to %d items; versions differ?",
      response.GetDescriptor()->name(), connection.target(), response.results_size(), items));
}

template <typename Response>
std::vector<int> ItemsInFlight(const Response& response) {
  std::vector<int> items;
  for (int i = 0; i < response.results_size(); ++i) {
    if (response.results(i).status().reason() == kReasonInFlight) items.push_back(i);
  }
  return items;
}

// Sends those of `items` once more and puts their results in place. An attempt that fails leaves
// them as they are: in flight.
template <typename Response, typename Item>
void RepeatItems(Connection& connection, const Step& step, std::span<const Item> items,
                 const std::vector<int>& which, Attempts& attempts, Response* response) {
  std::vector<Item> part;
  for (const int item : which) part.push_back(items[static_cast<size_t>(item)]);
  const Encoded request = Encode(step, std::span<const Item>(part), connection.send_buffers());
  Response answer;
  if (!connection.Call(request, &answer, attempts).ok()) return;
  if (answer.results_size() != static_cast<int>(part.size())) return;
  response->set_boot_id(answer.boot_id());
  for (size_t i = 0; i < which.size(); ++i) {
    response->mutable_results(which[i])->Swap(answer.mutable_results(static_cast<int>(i)));
  }
}

template <typename Result, typename Response, typename Item>
absl::StatusOr<std::vector<Result>> CallBatch(Connection& connection, const Step& step,
                                              std::span<const Item> items) {
  Response response;
  Attempts attempts = connection.DataAttempts();
  EBBTIDE_RETURN_IF_ERROR(
      connection.Call(Encode(step, items, connection.send_buffers()), &response, attempts));
  EBBTIDE_RETURN_IF_ERROR(CheckCount(connection, response, static_cast<int>(items.size())));
  // Without a lost answer, an item in flight is another caller's and not ours to wait for.
  std::vector<int> in_flight;
  if (attempts.made() > 1) in_flight = ItemsInFlight(response);
  while (!in_flight.empty() && attempts.Next()) {
    RepeatItems(connection, step, items, in_flight, attempts, &response);
    in_flight = ItemsInFlight(response);
  }
  connection.NoteBoot(response.boot_id());
  std::vector<Result> results;
  results.reserve(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    results.push_back(FromWire(std::move(*response.mutable_results(static_cast<int>(i)))));
    absl::Status boot = CheckBoot(connection, *items[i].sequence, response.boot_id());
    if (!boot.ok()) results.back().status = std::move(boot);
  }
  return results;
}

}  // namespace

absl::StatusOr<std::vector<AppendResult>> CallAppend(Connection& connection, const Step& step,
                                                     std::span<const AppendItem> items) {
  return CallBatch<AppendResult, v1::AppendResponse>(connection, step, items);
}

absl::StatusOr<std::vector<AttendResult>> CallAttend(Connection& connection, const Step& step,
                                                     std::span<const AttendItem> items) {
  return CallBatch<AttendResult, v1::AttendResponse>(connection, step, items);
}

absl::Status CheckBoot(const Connection& connection, const Sequence& sequence,
                       std::string_view answering_boot_id) {
  if (answering_boot_id == sequence.boot_id()) return absl::OkStatus();
  return WithReason(
      absl::AbortedError(absl::StrFormat(
          "sequence \"%s\": the daemon at %s restarted since it was opened (boot id %s, now %s); "
          "open it again and prefill what it does not hold",
          sequence.name(), connection.target(), sequence.boot_id(), answering_boot_id)),
      kReasonRestarted);
}

}  // namespace ebbtide::client
