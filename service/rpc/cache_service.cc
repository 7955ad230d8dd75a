// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/cache_service.h"

#include <utility>
#include <vector>

#include "absl/strings/str_format.h"

#include "base/bytes.h"
#include "base/status_macros.h"
#include "service/reason.h"
#include "service/rpc/call.h"
#include "service/rpc/convert_answer.h"
#include "service/rpc/convert_request.h"

namespace ebbtide::service {

CacheService::CacheService(const Parts& parts)
    : RawService(kCacheServiceName,
                 {.facts = parts.facts, .admission = parts.admission, .refusals = parts.refusals}),
      parts_(parts) {
  Add(&CacheService::RegisterModel);
  Add(&CacheService::OpenSequence);
  Add(&CacheService::Append);
  Add(&CacheService::Attend);
  Add(&CacheService::ReadPages);
  Add(&CacheService::Truncate);
  Add(&CacheService::CloseSequence);
  EBBTIDE_CHECK(is_complete(), "every method of CacheService is answered");
}

template <typename Request, typename Response>
void CacheService::Add(absl::Status (CacheService::*method)(RawCall&, const Request&, Response&)) {
  RawService::Add<Request, Response>(
      [this, method](RawCall& call, const Request& request, Response& response) {
        response.set_boot_id(parts_.facts.boot_id);
        return (this->*method)(call, request, response);
      });
}

absl::Status CacheService::RegisterModel(RawCall&, const v1::RegisterModelRequest& request,
                                         v1::RegisterModelResponse& response) {
  EBBTIDE_RETURN_IF_ERROR(parts_.refusals.Counted(CheckName("model", request.model())));
  const std::string& weights = request.weights_fingerprint();
  EBBTIDE_RETURN_IF_ERROR(parts_.refusals.Counted(CheckText("weights_fingerprint", weights)));
  const absl::StatusOr<Geometry> asked = ReadGeometry(request.geometry());
  EBBTIDE_RETURN_IF_ERROR(parts_.refusals.Counted(asked.status()));
  EBBTIDE_ASSIGN_OR_RETURN(const Geometry geometry,
                           parts_.engine.RegisterModel(request.model(), *asked, weights));
  WriteGeometry(geometry, *response.mutable_geometry());
  response.set_page_bytes(geometry.page_shape().page_bytes());
  response.set_record_bytes(
      geometry.record(ModelFingerprint(request.model(), weights, geometry)).record_bytes());
  return absl::OkStatus();
}

absl::Status CacheService::OpenSequence(RawCall&, const v1::OpenSequenceRequest& request,
                                        v1::OpenSequenceResponse& response) {
  const absl::StatusOr<OpenArgs> args = ReadOpen(request);
  EBBTIDE_RETURN_IF_ERROR(parts_.refusals.Counted(args.status()));
  EBBTIDE_ASSIGN_OR_RETURN(const OpenAnswer answer, parts_.engine.OpenSequence(*args));
  WriteOpen(answer, response);
  return absl::OkStatus();
}

template <typename Response, typename Write>
absl::Status CacheService::AnswerStep(const grpc::ServerContext& context,
                                      absl::StatusOr<StepRequest> step, Response& response,
                                      Write write) {
  EBBTIDE_RETURN_IF_ERROR(parts_.refusals.Counted(step.status()));
  if (step->answer_bytes > parts_.facts.message_bytes_max) {
    return parts_.refusals.Counted(Refuse(
        absl::StatusCode::kResourceExhausted, "ANSWER_TOO_LARGE",
        absl::StrFormat("the answer would have about %s, over the limit of %s for a message; "
                        "send fewer items or tokens per call",
                        FormatBytes(step->answer_bytes),
                        FormatBytes(parts_.facts.message_bytes_max))));
  }
  step->call.deadline = parts_.clock.SinceStart() + TimeLeft(context, parts_.facts.call_deadline);
  std::vector<StepAnswer> answers;
  if (!step->items.empty()) {
    answers = parts_.engine.Step(step->call, step->items);
  }
  size_t carried_out = 0;
  for (const absl::Status& refusal : step->refusals) {
    auto& result = *response.add_results();
    if (refusal.ok()) {
      write(answers[carried_out], step->items[carried_out], result);
      ++carried_out;
    } else {
      WriteItemStatus(parts_.refusals.Counted(refusal), *result.mutable_status());
    }
  }
  return absl::OkStatus();
}

absl::Status CacheService::Append(RawCall& call, const v1::AppendRequest& request,
                                  v1::AppendResponse& response) {
  return AnswerStep(call.context, ReadAppend(request), response,
                    [](const StepAnswer& answer, const StepItem&, v1::AppendResult& result) {
                      WriteAppend(answer, result);
                    });
}

absl::Status CacheService::Attend(RawCall& call, const v1::AttendRequest& request,
                                  v1::AttendResponse& response) {
  return AnswerStep(call.context, ReadAttend(request), response, WriteAttend);
}

absl::Status CacheService::ReadPages(RawCall& call, const v1::ReadPagesRequest& request,
                                     v1::ReadPagesResponse& response) {
  EBBTIDE_RETURN_IF_ERROR(parts_.refusals.Counted(CheckName("sequence", request.sequence())));
  const absl::Duration left = TimeLeft(call.context, parts_.facts.call_deadline);
  // Pages are held as such, as a message, and as gRPC sends it.
  const auto admit = [&](uint64_t bytes) {
    return call.ticket.Grow(3 * bytes, "call's answer, as it is held,");
  };
  EBBTIDE_ASSIGN_OR_RETURN(
      const std::vector<PageBytes> pages,
      parts_.engine.ReadPages({.sequence = request.sequence(),
                               .layer = request.layer(),
                               .kv_head = request.kv_head(),
                               .first_page = request.first_page(),
                               .page_count = request.page_count(),
                               .answer_bytes_max = parts_.facts.message_bytes_max,
                               .admit = admit,
                               .deadline = parts_.clock.SinceStart() + left}));
  for (const PageBytes& page : pages) {
    WritePage(page, *response.add_pages());
  }
  return absl::OkStatus();
}

absl::Status CacheService::Truncate(RawCall&, const v1::TruncateRequest& request,
                                    v1::TruncateResponse& response) {
  EBBTIDE_RETURN_IF_ERROR(parts_.refusals.Counted(CheckName("sequence", request.sequence())));
  EBBTIDE_ASSIGN_OR_RETURN(const uint64_t length,
                           parts_.engine.Truncate(request.sequence(), request.length()));
  response.set_length(length);
  return absl::OkStatus();
}

absl::Status CacheService::CloseSequence(RawCall&, const v1::CloseSequenceRequest& request,
                                         v1::CloseSequenceResponse&) {
  EBBTIDE_RETURN_IF_ERROR(parts_.refusals.Counted(CheckName("sequence", request.sequence())));
  return parts_.engine.CloseSequence(request.sequence());
}

}  // namespace ebbtide::service
