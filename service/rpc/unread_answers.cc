// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/unread_answers.h"

#include "base/log.h"

namespace ebbtide::service {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::ServerRpcInfo;

// Lives from a call's arrival until gRPC is done with it.
class UnreadAnswers::WatchedCall final : public grpc::experimental::Interceptor {
 public:
  WatchedCall(UnreadAnswers& answers, ServerRpcInfo& call)
      : answers_(answers),
        call_(call.server_context()),
        is_stream_(call.type() != ServerRpcInfo::Type::UNARY) {
    if (!is_stream_) answers_.Arrive();
    // A stream of reflection holds a thread all the while.
    if (call.type() == ServerRpcInfo::Type::BIDI_STREAMING) answers_.Begin(call_);
  }
  ~WatchedCall() override { answers_.End(call_, is_stream_); }

  void Intercept(grpc::experimental::InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      answers_.Begin(call_);
    }
    methods->Proceed();
  }

 private:
  UnreadAnswers& answers_;
  grpc::ServerContextBase* const call_;
  const bool is_stream_;
};

class UnreadAnswers::Watcher final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Watcher(UnreadAnswers& answers) : answers_(answers) {}
  grpc::experimental::Interceptor* CreateServerInterceptor(ServerRpcInfo* call) override {
    return new WatchedCall(answers_, *call);  // gRPC deletes it.
  }

 private:
  UnreadAnswers& answers_;
};

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>
UnreadAnswers::MakeWatcher() {
  return std::make_unique<Watcher>(*this);
}

int UnreadAnswers::CutOff(absl::Duration patience) {
  int count = 0;
  {
    const absl::MutexLock lock(&mu_);  // While it is held, calls wait to end.
    const absl::Duration now = clock_.SinceStart();
    for (auto& [call, since] : since_) {
      if (now - since <= patience) continue;
      call->TryCancel();
      since = absl::InfiniteDuration();  // Once.
      ++count;
    }
  }
  if (count > 0) {
    Log(LogLevel::kWarn, "calls whose answers nobody reads are cut off",
        {{"calls", count}, {"waited_seconds", absl::ToInt64Seconds(patience)}});
  }
  return count;
}

void UnreadAnswers::WaitUntilRead(absl::Duration patience) {
  const absl::MutexLock lock(&mu_);
  const auto is_read = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return calls_ == 0; };
  mu_.AwaitWithTimeout(absl::Condition(&is_read), patience);
}

void UnreadAnswers::Arrive() {
  const absl::MutexLock lock(&mu_);
  ++calls_;
}

void UnreadAnswers::Begin(grpc::ServerContextBase* call) {
  const absl::MutexLock lock(&mu_);
  since_.try_emplace(call, clock_.SinceStart());
}

void UnreadAnswers::End(grpc::ServerContextBase* call, bool is_stream) {
  const absl::MutexLock lock(&mu_);
  since_.erase(call);
  if (!is_stream) --calls_;
}

}  // namespace ebbtide::service
