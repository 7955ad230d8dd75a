// SPDX-License-Identifier: Apache-2.0
//
// StatsService (proto/ebbtide/v1/stats.proto): what anyone watching may ask. Admitted apart from
// the workers' calls, so that a busy daemon can still be watched. Tested by
// tests/unit/service/rpc_server_test.cc.

#pragma once

#include "base/clock.h"
#include "ebbtide/v1/stats.pb.h"
#include "service/engine.h"
#include "service/rpc/admission.h"
#include "service/rpc/raw_service.h"
#include "service/rpc/refusals.h"
#include "service/rpc/server_facts.h"

namespace ebbtide::service {

inline constexpr char kStatsServiceName[] = "ebbtide.v1.StatsService";

// Thread-safe. Borrows all it is given.
class StatsService final : public RawService {
 public:
  struct Parts {
    Engine& engine;
    Clock& clock;
    const ServerFacts& facts;
    Admission& admission;
    Refusals& refusals;
  };
  explicit StatsService(const Parts& parts);

 private:
  template <typename Request, typename Response>
  void Add(absl::Status (StatsService::*method)(const Request&, Response&));

  absl::Status GetServerInfo(const v1::GetServerInfoRequest& request,
                             v1::GetServerInfoResponse& response);
  absl::Status GetStats(const v1::GetStatsRequest& request, v1::GetStatsResponse& response);
  absl::Status ListSequences(const v1::ListSequencesRequest& request,
                             v1::ListSequencesResponse& response);
  absl::Status DescribeSequence(const v1::DescribeSequenceRequest& request,
                                v1::DescribeSequenceResponse& response);

  const Parts parts_;
};

}  // namespace ebbtide::service
