// SPDX-License-Identifier: Apache-2.0
//
// Listens, and answers workers and watchers until told to stop: CacheService, StatsService, health
// (grpc.health.v1, by service name; "" is CacheService) and reflection. Tested by
// tests/unit/service/rpc_server_test.cc.

#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/server.h"

#include "base/clock.h"
#include "service/config/config.h"
#include "service/engine.h"
#include "service/rpc/admission.h"
#include "service/rpc/cache_service.h"
#include "service/rpc/listener.h"
#include "service/rpc/refusals.h"
#include "service/rpc/server_facts.h"
#include "service/rpc/stats_service.h"
#include "service/rpc/unread_answers.h"

namespace ebbtide::service {

// Thread-safe.
class RpcServer {
 public:
  // Long, since an idle worker's gRPC looks at its connection every 5 s.
  static constexpr absl::Duration kSilenceMax = absl::Minutes(2);

  // Listens from the moment it returns. `facts` lacks what the configuration and the socket say,
  // which is filled in. `engine` and `clock` must outlive the server. A connection whose other end
  // says nothing for `silence_max`, though it is asked, is ended.
  //   kFailedPrecondition  somebody listens there already (socket_claim.h)
  //   kUnavailable, …      the system's own words
  static absl::StatusOr<std::unique_ptr<RpcServer>> Listen(
      const ServerConfig& config, ServerFacts facts, Engine& engine, Clock& clock,
      absl::Duration silence_max = kSilenceMax);
  // Cuts off what is still in progress, and removes the socket.
  ~RpcServer();

  const ServerFacts& facts() const { return facts_; }
  std::string target() const;  // What a client dials: "unix:/…", "127.0.0.1:50051".

  // CacheService is not healthy while as many calls as may be are in progress and none has ended
  // for ten seconds, nor while nobody can connect. Called now and then.
  void RefreshHealth();

  // Ends calls whose answers nobody has read for ten seconds, counted as ANSWER_UNREAD; returns how
  // many. Called now and then.
  int CutOffUnread();

  // From now on not healthy, and every new call of a worker is refused.
  void StopAdmitting();
  // Waits until no worker's call is in progress, at most `patience`; returns whether none is.
  bool WaitIdle(absl::Duration patience) { return admission_.WaitIdle(patience); }

 private:
  RpcServer(const ServerConfig& config, ServerFacts facts, Engine& engine, Clock& clock);
  absl::Status Start(const ServerConfig& config, absl::Duration silence_max);
  bool CanConnect();
  void SetHealth(bool is_serving);

  ServerFacts facts_;
  Engine& engine_;
  Admission admission_;
  Admission watchers_;
  Refusals refusals_;
  UnreadAnswers unread_;
  CacheService cache_service_;
  StatsService stats_service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Listener> listener_;
  std::string why_nobody_connects_;  // As of the newest look.
};

}  // namespace ebbtide::service
