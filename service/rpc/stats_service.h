// SPDX-License-Identifier: Apache-2.0
//
// StatsService (proto/ebbtide/v1/stats.proto): what anyone watching may ask. Admitted apart from
// the workers' calls, so that a busy daemon can still be watched. Tested by
// tests/unit/service/rpc_server_test.cc.

#pragma once

#include "base/clock.h"
#include "ebbtide/v1/stats.grpc.pb.h"
#include "service/engine.h"
#include "service/rpc/admission.h"
#include "service/rpc/refusals.h"
#include "service/rpc/server_facts.h"

namespace ebbtide::service {

// Thread-safe. Borrows all it is given.
class StatsService final : public v1::StatsService::Service {
 public:
  struct Parts {
    Engine& engine;
    Clock& clock;
    const ServerFacts& facts;
    Admission& admission;
    Refusals& refusals;
  };
  explicit StatsService(const Parts& parts) : parts_(parts) {}

  grpc::Status GetServerInfo(grpc::ServerContext* context, const v1::GetServerInfoRequest* request,
                             v1::GetServerInfoResponse* response) override;
  grpc::Status GetStats(grpc::ServerContext* context, const v1::GetStatsRequest* request,
                        v1::GetStatsResponse* response) override;
  grpc::Status ListSequences(grpc::ServerContext* context, const v1::ListSequencesRequest* request,
                             v1::ListSequencesResponse* response) override;
  grpc::Status DescribeSequence(grpc::ServerContext* context,
                                const v1::DescribeSequenceRequest* request,
                                v1::DescribeSequenceResponse* response) override;

 private:
  template <typename Work>
  grpc::Status Answer(grpc::ServerContext& context, Work work);

  const Parts parts_;
};

}  // namespace ebbtide::service
