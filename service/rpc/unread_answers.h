// SPDX-License-Identifier: Apache-2.0
//
// Answers that nobody reads. gRPC holds a thread for each answer until its reader took it: a worker
// that is stopped, or hangs, would hold them all and nobody else would be answered. After a while
// its calls are cut off. Tested by tests/unit/service/rpc_server_test.cc.

#pragma once

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "grpcpp/server_context.h"
#include "grpcpp/support/server_interceptor.h"

#include "base/clock.h"

namespace ebbtide::service {

// Thread-safe. Outlives the server that it watches.
class UnreadAnswers {
 public:
  explicit UnreadAnswers(Clock& clock) : clock_(clock) {}

  // For grpc::ServerBuilder: sees every call.
  std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeWatcher();

  // Cuts off the calls whose answers wait for longer than `patience`, and streams, which are open
  // for so long; returns how many.
  int CutOff(absl::Duration patience) ABSL_LOCKS_EXCLUDED(mu_);

  // Waits until every call that is no stream is answered and its answer read, at most `patience`.
  void WaitUntilRead(absl::Duration patience) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  class WatchedCall;
  class Watcher;

  void Arrive() ABSL_LOCKS_EXCLUDED(mu_);
  void Begin(grpc::ServerContextBase* call) ABSL_LOCKS_EXCLUDED(mu_);
  void End(grpc::ServerContextBase* call, bool is_stream) ABSL_LOCKS_EXCLUDED(mu_);

  Clock& clock_;
  absl::Mutex mu_;
  int calls_ ABSL_GUARDED_BY(mu_) = 0;  // No streams.
  absl::flat_hash_map<grpc::ServerContextBase*, absl::Duration> since_ ABSL_GUARDED_BY(mu_);
};

}  // namespace ebbtide::service
