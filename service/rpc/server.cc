// SPDX-License-Identifier: Apache-2.0
//
// The synchronous API of gRPC: a thread per call in progress, which admission.h bounds. Handing
// calls from the callback API to threads of our own cost 20 to 30 µs more per call, and the work
// needs a thread either way.

#include "service/rpc/server.h"

#include <grpc/grpc.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/server_builder.h"
#include "grpcpp/server_posix.h"

#include "base/log.h"
#include "base/status_macros.h"
#include "service/config/listen.h"

namespace ebbtide::service {
namespace {

constexpr absl::Duration kStuckAfter = absl::Seconds(10);
// The longest message takes a second over loopback.
constexpr absl::Duration kReadWithin = absl::Seconds(10);
// Answers that are made when the server goes have so long to be delivered.
constexpr absl::Duration kDeliverWithin = absl::Seconds(5);
// Calls that arrive while the server goes have so long to be refused.
constexpr std::chrono::milliseconds kRefuseWithin(100);
constexpr uint32_t kWatchersMax = 8;
constexpr uint64_t kWatchersBytesMax = uint64_t{1} << 20;  // They send a name or two.
constexpr int kSpareThreads = 16;  // For refusing, reflection and gRPC's own polling.

// What gRPC holds beside messages: connections, calls, read buffers.
constexpr uint64_t kGrpcOwnBytes = uint64_t{64} << 20;

// Four of the largest messages may be on their way in at one time, or many smaller ones.
uint64_t BytesArrivingMax(const ServerConfig& config) {
  return 4 * config.message_bytes_max;
}

// As many as arrive may be in progress, parsed.
uint64_t BytesInProgressMax(const ServerConfig& config) {
  return BytesArrivingMax(config) + 4 * kParsedBytesBesides;
}

// gRPC 1.51 goes down with its last server, and then waits up to 10 s for a poller of its own that
// a long write began. With one more user it stays up until the process ends.
void KeepGrpcUp() {
  static const bool kIsUp = (grpc_init(), true);
  static_cast<void>(kIsUp);
}

}  // namespace

RpcServer::RpcServer(const ServerConfig& config, ServerFacts facts, Engine& engine, Clock& clock)
    : facts_(std::move(facts)),
      engine_(engine),
      admission_({.calls = config.calls_in_flight_max,
                  .bytes = BytesInProgressMax(config),
                  .advice = "call again later, or raise server.calls_in_flight_max"},
                 clock),
      watchers_({.calls = kWatchersMax,
                 .bytes = kWatchersBytesMax,
                 .advice = "call again later, or have fewer watchers ask at a time"},
                clock),
      unread_(clock),
      cache_service_({.engine = engine,
                      .clock = clock,
                      .facts = facts_,
                      .admission = admission_,
                      .refusals = refusals_}),
      stats_service_({.engine = engine,
                      .clock = clock,
                      .facts = facts_,
                      .admission = watchers_,
                      .refusals = refusals_}) {
  facts_.message_bytes_max = config.message_bytes_max;
  facts_.call_deadline = config.call_deadline;
}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Listen(const ServerConfig& config,
                                                             ServerFacts facts, Engine& engine,
                                                             Clock& clock,
                                                             absl::Duration silence_max) {
  // No make_unique: the constructor is private.
  std::unique_ptr<RpcServer> server(new RpcServer(config, std::move(facts), engine, clock));
  EBBTIDE_ASSIGN_OR_RETURN(server->listener_, Listener::Open(config.listen));
  EBBTIDE_RETURN_IF_ERROR(server->Start(config, silence_max));
  server->SetHealth(true);
  return server;
}

absl::Status RpcServer::Start(const ServerConfig& config, absl::Duration silence_max) {
  KeepGrpcUp();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  builder.RegisterService(&cache_service_);
  builder.RegisterService(&stats_service_);
  const auto message_bytes_max = static_cast<int>(config.message_bytes_max);
  // raw_service.h refuses longer ones, with a reason. gRPC looks at the length no sooner: at a
  // message that has arrived.
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(message_bytes_max);
  // Otherwise gRPC unpacks a message to a thousand times its length, whatever limit is set.
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    builder.SetCompressionAlgorithmSupportStatus(algorithm, false);
  }
  // One client alone can't hold all threads; what it calls beyond this waits on its own side.
  const auto calls_max = static_cast<int>(config.calls_in_flight_max);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                             std::max(kSpareThreads / 2, calls_max / 2));
  // gRPC's own limit for a connection to begin holds for those alone that it accepts itself.
  const auto half_ms = static_cast<int>(absl::ToInt64Milliseconds(silence_max / 2));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, half_ms);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, half_ms);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> watchers;
  watchers.push_back(unread_.MakeWatcher());
  builder.experimental().SetInterceptorCreators(std::move(watchers));
  grpc::ResourceQuota quota("ebbtided");
  // Messages on their way in: beyond this gRPC stops reading, and cuts calls off.
  quota.Resize(BytesArrivingMax(config) + kGrpcOwnBytes);
  quota.SetMaxThreads(calls_max + static_cast<int>(kWatchersMax) + kSpareThreads);
  builder.SetResourceQuota(quota);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) return absl::UnavailableError("gRPC does not start");
  const std::string prefix = config.listen.socket_path.empty() ? "tcp:" : "";
  facts_.transports = {prefix + FormatListen(listener_->place())};
  listener_->Accept([server = server_.get()](int connection) {
    grpc::AddInsecureChannelFromFd(server, connection);
  });
  return absl::OkStatus();
}

RpcServer::~RpcServer() {
  if (server_ != nullptr) {
    listener_->Close();
    unread_.WaitUntilRead(kDeliverWithin);
    // gRPC waits for connections too, and a worker that does nothing looks at its own every 5 s.
    listener_->HangUp();
    server_->Shutdown(std::chrono::system_clock::now() + kRefuseWithin);
    server_->Wait();
  }
}

std::string RpcServer::target() const {
  const std::string& transport = facts_.transports.front();
  return transport.starts_with("tcp:") ? transport.substr(4) : transport;
}

void RpcServer::SetHealth(bool is_serving) {
  grpc::HealthCheckServiceInterface& health = *server_->GetHealthCheckService();
  health.SetServingStatus("", is_serving);
  health.SetServingStatus(kCacheServiceName, is_serving);
  health.SetServingStatus(kStatsServiceName, true);
}

void RpcServer::RefreshHealth() {
  if (!admission_.is_closed()) {
    const bool can_connect = CanConnect();
    SetHealth(can_connect && admission_.StuckFor() < kStuckAfter && !engine_.is_device_lost());
  }
}

bool RpcServer::CanConnect() {
  const absl::Status status = listener_->status();
  std::string why(status.message());
  if (why != why_nobody_connects_) {
    if (!status.ok()) Log(LogLevel::kError, "nobody can connect", {{"why", why}});
    if (status.ok()) Log(LogLevel::kInfo, "clients can connect again");
  }
  why_nobody_connects_ = std::move(why);
  return status.ok();
}

int RpcServer::CutOffUnread() {
  const int count = unread_.CutOff(kReadWithin);
  refusals_.Count("ANSWER_UNREAD", count);
  return count;
}

void RpcServer::StopAdmitting() {
  admission_.Close();
  SetHealth(false);
}

}  // namespace ebbtide::service
