// SPDX-License-Identifier: Apache-2.0
//
// CacheService (proto/ebbtide/v1/cache.proto): translates, checks, and asks the engine. It decides
// nothing. Tested by tests/unit/service/rpc_server_test.cc.

#pragma once

#include "base/clock.h"
#include "ebbtide/v1/cache.grpc.pb.h"
#include "service/engine.h"
#include "service/rpc/admission.h"
#include "service/rpc/refusals.h"
#include "service/rpc/server_facts.h"

namespace ebbtide::service {

// Thread-safe. Borrows all it is given.
class CacheService final : public v1::CacheService::Service {
 public:
  struct Parts {
    Engine& engine;
    Clock& clock;
    const ServerFacts& facts;
    Admission& admission;
    Refusals& refusals;
  };
  explicit CacheService(const Parts& parts) : parts_(parts) {}

  grpc::Status RegisterModel(grpc::ServerContext* context, const v1::RegisterModelRequest* request,
                             v1::RegisterModelResponse* response) override;
  grpc::Status OpenSequence(grpc::ServerContext* context, const v1::OpenSequenceRequest* request,
                            v1::OpenSequenceResponse* response) override;
  grpc::Status Append(grpc::ServerContext* context, const v1::AppendRequest* request,
                      v1::AppendResponse* response) override;
  grpc::Status Attend(grpc::ServerContext* context, const v1::AttendRequest* request,
                      v1::AttendResponse* response) override;
  grpc::Status ReadPages(grpc::ServerContext* context, const v1::ReadPagesRequest* request,
                         v1::ReadPagesResponse* response) override;
  grpc::Status Truncate(grpc::ServerContext* context, const v1::TruncateRequest* request,
                        v1::TruncateResponse* response) override;
  grpc::Status CloseSequence(grpc::ServerContext* context, const v1::CloseSequenceRequest* request,
                             v1::CloseSequenceResponse* response) override;

 private:
  // Admits the call, lets `work` answer it, and tells its error.
  template <typename Request, typename Response, typename Work>
  grpc::Status Answer(grpc::ServerContext& context, const Request& request, Response& response,
                      Work work);

  // Append and Attend.
  template <typename Read, typename Response, typename Write>
  absl::Status AnswerStep(const grpc::ServerContext& context, const Read& read, Response& response,
                          Write write);

  const Parts parts_;
};

}  // namespace ebbtide::service
