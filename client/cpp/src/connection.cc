// SPDX-License-Identifier: Apache-2.0
//
// gRPC's only home in the client: channel, stubs, deadlines, errors in our words.

#include "client/cpp/src/connection.h"

#include <grpc/grpc.h>
#include <grpcpp/alarm.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/channel_arguments.h>
#include <grpcpp/support/slice.h>

#include <functional>
#include <stop_token>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

#include "base/clock.h"
#include "client/cpp/src/reach.h"
#include "ebbtide/v1/cache.grpc.pb.h"
#include "ebbtide/v1/stats.grpc.pb.h"

namespace ebbtide::client {
namespace {

constexpr char kReasonUrl[] = "ebbtide.dev/reason";
constexpr char kReasonTrailer[] = "ebbtide-reason";

// Between two calls of a busy worker there may be no more than a millisecond in a hundred: look
// often, and not in step with it.
constexpr absl::Duration kLookPause = absl::Milliseconds(3);
constexpr absl::Duration kLeaveTimeout = absl::Seconds(2);

// gRPC 1.51 goes down with its last channel, and then waits up to 10 s for a poller of its own that
// a long write began. With one more user it stays up until the process ends.
void KeepGrpcUp() {
  static const bool kIsUp = (grpc_init(), true);
  static_cast<void>(kIsUp);
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& target) {
  KeepGrpcUp();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);  // The daemon's limit rules; gRPC's own is 4 MiB.
  arguments.SetMaxSendMessageSize(-1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);     // Attempts counts them, nobody else.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // A sidecar is never behind a proxy.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);  // How long one connect may take.
  return grpc::CreateCustomChannel(target, grpc::InsecureChannelCredentials(), arguments);
}

// "Attend" of an AttendRequest.
std::string CallName(const google::protobuf::Message& request) {
  const std::string& name = request.GetDescriptor()->name();
  return name.substr(0, name.size() - std::string_view("Request").size());
}

std::string TrailerReason(const grpc::ClientContext& context) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find(kReasonTrailer);
  return found == trailers.end() ? "" : std::string(found->second.data(), found->second.size());
}

// The daemon's own errors pass as they came; those of the way to it get the endpoint and the fix.
absl::Status InOurWords(const grpc::Status& status, const std::string& reason,
                        const Unanswered& unanswered) {
  if (!reason.empty()) {
    return WithReason(
        absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message()),
        reason);
  }
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
      return WithReason(WhyUnreachable(unanswered), kReasonUnreachable);
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      if (unanswered.is_first) {
        return absl::DeadlineExceededError(IsNoDaemon(unanswered.target, "no answer in time"));
      }
      return absl::DeadlineExceededError(absl::StrFormat(
          "%s: no answer from %s in time; it may or may not have been carried out, and the same "
          "call again is safe",
          unanswered.call, unanswered.target));
    case grpc::StatusCode::UNIMPLEMENTED:
      if (unanswered.is_first) {
        return absl::UnimplementedError(IsNoDaemon(unanswered.target, "it knows no such call"));
      }
      [[fallthrough]];
    default:
      return absl::Status(
          static_cast<absl::StatusCode>(status.error_code()),
          absl::StrFormat("%s at %s: %s", unanswered.call, unanswered.target, unanswered.said));
  }
}

// Holds the bytes until gRPC is done with them, which may be after the call: one that is given up
// is perhaps half written.
grpc::Slice SliceOf(const Encoded& message) {
  auto* const held = new std::shared_ptr<const uint8_t[]>(message.memory);
  return {const_cast<uint8_t*>(message.memory.get()), message.bytes,
          [](void* done) { delete static_cast<std::shared_ptr<const uint8_t[]>*>(done); }, held};
}

// Gives a call up once a stop is asked for.
class GivenUpAt {
 public:
  GivenUpAt(const std::stop_token& stop, grpc::ClientContext& context)
      : at_stop_(stop, [&context] { context.TryCancel(); }) {}

 private:
  const std::stop_callback<std::function<void()>> at_stop_;
};

// A call whose request is bytes already; what a stub's method does otherwise.
template <typename Response>
grpc::Status CallBytes(grpc::GenericStub& stub, const std::string& method,
                       grpc::ClientContext& context, const grpc::ByteBuffer& request,
                       Response* response) {
  grpc::CompletionQueue done;
  const auto call = stub.PrepareUnaryCall(&context, method, request, &done);
  call->StartCall();
  grpc::ByteBuffer answer;
  grpc::Status status;
  call->Finish(&answer, &status, nullptr);
  void* tag = nullptr;
  bool is_read = false;
  done.Next(&tag, &is_read);
  if (!status.ok()) return status;
  return grpc::SerializationTraits<Response>::Deserialize(&answer, response);
}

// OpenSequence, whose answer may come for a while after the stop: the daemon carries out what has
// reached it, and who knows of the sequence can close it.
//   DEADLINE_EXCEEDED  it did not come in that while either
grpc::Status AwaitOpened(v1::CacheService::Stub& stub, grpc::ClientContext& context,
                         const v1::OpenSequenceRequest& request, v1::OpenSequenceResponse* response,
                         const std::stop_token& stop) {
  grpc::CompletionQueue events;
  grpc::Alarm give_up;
  grpc::Status status;
  const auto call = stub.AsyncOpenSequence(&context, request, &events);
  call->Finish(response, &status, call.get());
  bool is_given_up = false;
  {
    const std::stop_callback at_stop(stop, [&] {
      give_up.Set(&events, absl::ToChronoTime(absl::Now() + kLeaveTimeout), &give_up);
    });
    void* tag = nullptr;
    bool is_due = false;
    while (events.Next(&tag, &is_due) && tag != call.get()) {
      is_given_up = true;
      context.TryCancel();
    }
  }
  give_up.Cancel();
  events.Shutdown();
  void* tag = nullptr;
  for (bool is_due = false; events.Next(&tag, &is_due);) {
  }
  if (!is_given_up || status.error_code() != grpc::StatusCode::CANCELLED) return status;
  return {grpc::StatusCode::DEADLINE_EXCEEDED, "no answer after the stop"};
}

void WaitUnlessStopped(absl::Duration pause, const std::stop_token& stop) {
  absl::Notification stopped;
  const std::stop_callback wake(stop, [&] { stopped.Notify(); });
  stopped.WaitForNotificationWithTimeout(pause);
}

bool IsWorthRepeating(const grpc::Status& status, const std::string& reason) {
  return status.error_code() == grpc::StatusCode::UNAVAILABLE && reason != kReasonNotMet;
}

}  // namespace

absl::Status WithReason(absl::Status status, std::string_view reason) {
  if (!status.ok() && !reason.empty()) {
    status.SetPayload(kReasonUrl, absl::Cord(absl::string_view(reason.data(), reason.size())));
  }
  return status;
}

std::string ErrorReason(const absl::Status& status) {
  const auto payload = status.GetPayload(kReasonUrl);
  return payload.has_value() ? std::string(*payload) : "";
}

struct Connection::Wire {
  Wire(std::string endpoint, const ClientOptions& client_options)
      : target(std::move(endpoint)),
        options(client_options),
        channel(MakeChannel(target)),
        cache(channel),
        stats(channel),
        generic(channel) {}

  // Fixed after construction.
  const std::string target;
  const ClientOptions options;
  const std::shared_ptr<grpc::Channel> channel;

  // Synchronised by themselves.
  v1::CacheService::Stub cache;
  v1::StatsService::Stub stats;
  grpc::GenericStub generic;
  SendBuffers send_buffers;

  mutable absl::Mutex mu;
  std::string boot_id ABSL_GUARDED_BY(mu);
  uint64_t message_bytes_max ABSL_GUARDED_BY(mu) = 0;

  Attempts AttemptsWithin(absl::Duration timeout,
                          absl::Duration look_pause = absl::ZeroDuration()) const {
    const std::stop_token& stop = options.stop;
    const auto wait = [stop](absl::Duration pause) { WaitUnlessStopped(pause, stop); };
    return Attempts({.attempts_max = options.attempts_max,
                     .backoff_first = options.backoff_first,
                     .look_pause = look_pause},
                    timeout, SteadyClock(), wait, stop);
  }

  bool HasBeenHeard() const {
    const absl::MutexLock lock(&mu);
    return !boot_id.empty();
  }

  absl::Status CheckSize(const std::string& call, uint64_t bytes) const {
    const absl::MutexLock lock(&mu);
    if (message_bytes_max == 0 || bytes <= message_bytes_max) return absl::OkStatus();
    return WithReason(absl::ResourceExhaustedError(absl::StrFormat(
                          "%s: the message has %u bytes, %s takes %u at most; send fewer tokens "
                          "or items per call",
                          call, bytes, target, message_bytes_max)),
                      kReasonTooLarge);
  }

  // `send` makes one attempt, and gives it up at a stop.
  template <typename Response, typename Send>
  absl::Status Repeat(const std::string& call, uint64_t bytes, Response* response,
                      Attempts& attempts, Send send) const {
    if (absl::Status size = CheckSize(call, bytes); !size.ok()) return size;
    while (!attempts.stop().stop_requested()) {
      response->Clear();
      grpc::ClientContext context;
      context.set_deadline(absl::ToChronoTime(absl::Now() + attempts.remaining()));
      const grpc::Status answer = send(context);
      if (answer.ok()) return absl::OkStatus();
      const bool is_out_of_time = answer.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED;
      const auto is_stopped = [&] { return attempts.stop().stop_requested() && !is_out_of_time; };
      if (is_stopped()) break;
      const std::string reason = TrailerReason(context);
      if (IsWorthRepeating(answer, reason) &&
          (reason == kReasonInFlight ? attempts.NextLook() : attempts.Next())) {
        continue;
      }
      if (is_stopped()) break;  // While it waited.
      return InOurWords(answer, reason,
                        {.call = call,
                         .target = target,
                         .said = answer.error_message(),
                         .is_first = !HasBeenHeard()});
    }
    return absl::CancelledError(absl::StrFormat("%s at %s: given up by its caller", call, target));
  }

  template <typename Stub, typename Request, typename Response>
  absl::Status Call(Stub& stub,
                    grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response, Attempts& attempts) const {
    return Repeat(CallName(request), request.ByteSizeLong(), response, attempts,
                  [&](grpc::ClientContext& context) {
                    const GivenUpAt give_up(attempts.stop(), context);
                    return (stub.*method)(&context, request, response);
                  });
  }

  template <typename Response>
  absl::Status CallEncoded(const std::string& call, const Encoded& request, Response* response,
                           Attempts& attempts) {
    const std::string method =
        absl::StrFormat("/%s/%s", v1::CacheService::service_full_name(), call);
    const grpc::Slice slice = SliceOf(request);
    const grpc::ByteBuffer bytes(&slice, 1);
    return Repeat(call, request.bytes, response, attempts, [&](grpc::ClientContext& context) {
      const GivenUpAt give_up(attempts.stop(), context);
      return CallBytes(generic, method, context, bytes, response);
    });
  }
};

Connection::Connection(std::unique_ptr<Wire> wire) : wire_(std::move(wire)) {}
Connection::~Connection() = default;

std::shared_ptr<Connection> Connection::Open(std::string target, const ClientOptions& options) {
  return std::shared_ptr<Connection>(
      new Connection(std::make_unique<Wire>(std::move(target), options)));
}

const std::string& Connection::target() const {
  return wire_->target;
}

SendBuffers& Connection::send_buffers() {
  return wire_->send_buffers;
}

std::string Connection::boot_id() const {
  const absl::MutexLock lock(&wire_->mu);
  return wire_->boot_id;
}

void Connection::NoteBoot(std::string_view boot_id) {
  const absl::MutexLock lock(&wire_->mu);
  wire_->boot_id = std::string(boot_id);
}

void Connection::LimitMessages(uint64_t message_bytes_max) {
  const absl::MutexLock lock(&wire_->mu);
  wire_->message_bytes_max = message_bytes_max;
}

Attempts Connection::ConnectAttempts() const {
  return wire_->AttemptsWithin(wire_->options.connect_timeout);
}

Attempts Connection::ControlAttempts() const {
  return wire_->AttemptsWithin(wire_->options.control_timeout);
}

Attempts Connection::DataAttempts() const {
  return wire_->AttemptsWithin(wire_->options.data_timeout);
}

Attempts Connection::LeavingAttempts() const {
  return Attempts({.attempts_max = 1, .look_pause = kLookPause}, kLeaveTimeout, SteadyClock(),
                  absl::SleepFor);
}

Attempts Connection::PatientAttempts() const {
  return wire_->AttemptsWithin(wire_->options.control_timeout, kLookPause);
}

// One line per call: which stub and which method carry it.
#define EBBTIDE_CLIENT_CALL(Service, stub, Name)                                                \
  absl::Status Connection::Call(const v1::Name##Request& request, v1::Name##Response* response, \
                                Attempts& attempts) const {                                     \
    return wire_->Call(wire_->stub, &v1::Service::Stub::Name, request, response, attempts);     \
  }
EBBTIDE_CLIENT_CALL(CacheService, cache, RegisterModel)
EBBTIDE_CLIENT_CALL(CacheService, cache, ReadPages)
EBBTIDE_CLIENT_CALL(CacheService, cache, Truncate)
EBBTIDE_CLIENT_CALL(CacheService, cache, CloseSequence)
EBBTIDE_CLIENT_CALL(StatsService, stats, GetServerInfo)
EBBTIDE_CLIENT_CALL(StatsService, stats, GetStats)
EBBTIDE_CLIENT_CALL(StatsService, stats, ListSequences)
EBBTIDE_CLIENT_CALL(StatsService, stats, DescribeSequence)
#undef EBBTIDE_CLIENT_CALL

absl::Status Connection::Call(const v1::OpenSequenceRequest& request,
                              v1::OpenSequenceResponse* response, Attempts& attempts) const {
  return wire_->Repeat(CallName(request), request.ByteSizeLong(), response, attempts,
                       [&](grpc::ClientContext& context) {
                         return AwaitOpened(wire_->cache, context, request, response,
                                            attempts.stop());
                       });
}

absl::Status Connection::Call(const Encoded& request, v1::AppendResponse* response,
                              Attempts& attempts) const {
  return wire_->CallEncoded("Append", request, response, attempts);
}
absl::Status Connection::Call(const Encoded& request, v1::AttendResponse* response,
                              Attempts& attempts) const {
  return wire_->CallEncoded("Attend", request, response, attempts);
}

}  // namespace ebbtide::client
