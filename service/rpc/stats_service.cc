// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/stats_service.h"

#include <vector>

#include "base/status_macros.h"
#include "service/model/geometry.h"
#include "service/rpc/convert_answer.h"
#include "service/rpc/convert_request.h"

namespace ebbtide::service {

StatsService::StatsService(const Parts& parts)
    : RawService(kStatsServiceName,
                 {.facts = parts.facts, .admission = parts.admission, .refusals = parts.refusals}),
      parts_(parts) {
  Add(&StatsService::GetServerInfo);
  Add(&StatsService::GetStats);
  Add(&StatsService::ListSequences);
  Add(&StatsService::DescribeSequence);
  EBBTIDE_CHECK(is_complete(), "every method of StatsService is answered");
}

template <typename Request, typename Response>
void StatsService::Add(absl::Status (StatsService::*method)(const Request&, Response&)) {
  RawService::Add<Request, Response>(
      [this, method](RawCall&, const Request& request, Response& response) {
        return (this->*method)(request, response);
      });
}

absl::Status StatsService::GetServerInfo(const v1::GetServerInfoRequest&,
                                         v1::GetServerInfoResponse& response) {
  const ServerFacts& facts = parts_.facts;
  response.set_version(facts.version);
  response.set_boot_id(facts.boot_id);
  response.set_backend(facts.backend);
  response.set_simulated_device(facts.simulated_device);
  response.mutable_transports()->Add(facts.transports.begin(), facts.transports.end());
  response.set_message_bytes_max(facts.message_bytes_max);
  response.set_chunk_tokens_max(kChunkTokensMax);
  response.set_default_recall(facts.default_recall);
  response.set_default_idle_timeout_ms(
      static_cast<uint64_t>(absl::ToInt64Milliseconds(facts.default_idle_timeout)));
  response.set_uptime_ms(
      static_cast<uint64_t>(absl::ToInt64Milliseconds(parts_.clock.SinceStart() - facts.started)));
  response.mutable_notes()->Add(facts.notes.begin(), facts.notes.end());
  return absl::OkStatus();
}

absl::Status StatsService::GetStats(const v1::GetStatsRequest&, v1::GetStatsResponse& response) {
  Stats stats = parts_.engine.GetStats();
  for (const auto& [reason, count] : parts_.refusals.counts()) {
    stats.refused[reason] += count;
  }
  WriteStats(stats, response);
  return absl::OkStatus();
}

absl::Status StatsService::ListSequences(const v1::ListSequencesRequest& request,
                                         v1::ListSequencesResponse& response) {
  const absl::StatusOr<ListArgs> args = ReadList(request);
  EBBTIDE_RETURN_IF_ERROR(parts_.refusals.Counted(args.status()));
  // One more than asked tells whether there is a next page.
  std::vector<SequenceSummary> found = parts_.engine.ListSequences(args->after, args->limit + 1);
  const bool has_more = found.size() > args->limit;
  if (has_more) {
    found.resize(args->limit);
    response.set_next_page_token(PageToken(found.back().sequence));
  }
  for (const SequenceSummary& summary : found) {
    WriteSummary(summary, *response.add_sequences());
  }
  return absl::OkStatus();
}

absl::Status StatsService::DescribeSequence(const v1::DescribeSequenceRequest& request,
                                            v1::DescribeSequenceResponse& response) {
  const absl::StatusOr<DescribeArgs> args = ReadDescribe(request);
  EBBTIDE_RETURN_IF_ERROR(parts_.refusals.Counted(args.status()));
  EBBTIDE_ASSIGN_OR_RETURN(const SequenceDescription description, parts_.engine.Describe(*args));
  WriteDescription(description, response);
  return absl::OkStatus();
}

}  // namespace ebbtide::service
