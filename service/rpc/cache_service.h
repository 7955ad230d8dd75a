// SPDX-License-Identifier: Apache-2.0
//
// CacheService (proto/ebbtide/v1/cache.proto): translates, checks, and asks the engine. It decides
// nothing. Tested by tests/unit/service/rpc_server_test.cc.

#pragma once

#include "base/clock.h"
#include "ebbtide/v1/cache.pb.h"
#include "service/engine.h"
#include "service/rpc/admission.h"
#include "service/rpc/convert_request.h"
#include "service/rpc/raw_service.h"
#include "service/rpc/refusals.h"
#include "service/rpc/server_facts.h"

namespace ebbtide::service {

inline constexpr char kCacheServiceName[] = "ebbtide.v1.CacheService";

// Thread-safe. Borrows all it is given.
class CacheService final : public RawService {
 public:
  struct Parts {
    Engine& engine;
    Clock& clock;
    const ServerFacts& facts;
    Admission& admission;
    Refusals& refusals;
  };
  explicit CacheService(const Parts& parts);

 private:
  template <typename Request, typename Response>
  void Add(absl::Status (CacheService::*method)(RawCall&, const Request&, Response&));

  absl::Status RegisterModel(RawCall& call, const v1::RegisterModelRequest& request,
                             v1::RegisterModelResponse& response);
  absl::Status OpenSequence(RawCall& call, const v1::OpenSequenceRequest& request,
                            v1::OpenSequenceResponse& response);
  absl::Status Append(RawCall& call, const v1::AppendRequest& request,
                      v1::AppendResponse& response);
  absl::Status Attend(RawCall& call, const v1::AttendRequest& request,
                      v1::AttendResponse& response);
  absl::Status ReadPages(RawCall& call, const v1::ReadPagesRequest& request,
                         v1::ReadPagesResponse& response);
  absl::Status Truncate(RawCall& call, const v1::TruncateRequest& request,
                        v1::TruncateResponse& response);
  absl::Status CloseSequence(RawCall& call, const v1::CloseSequenceRequest& request,
                             v1::CloseSequenceResponse& response);

  // Append and Attend, once the request is converted.
  template <typename Response, typename Write>
  absl::Status AnswerStep(const grpc::ServerContext& context, absl::StatusOr<StepRequest> step,
                          Response& response, Write write);

  const Parts parts_;
};

}  // namespace ebbtide::service
