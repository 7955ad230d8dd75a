// SPDX-License-Identifier: Apache-2.0
//
// The synchronous API of gRPC: a thread per call in progress, which admission.h bounds. Handing
// calls from the callback API to threads of our own cost 20 to 30 µs more per call, and the work
// needs a thread either way.

#include "service/rpc/server.h"

#include <grpc/grpc.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

#include "absl/strings/str_format.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/security/server_credentials.h"
#include "grpcpp/server_builder.h"

#include "base/status_macros.h"
#include "service/config/listen.h"
#include "service/rpc/socket_claim.h"

namespace ebbtide::service {
namespace {

constexpr absl::Duration kStuckAfter = absl::Seconds(10);
// The longest message takes a second over loopback.
constexpr absl::Duration kReadWithin = absl::Seconds(10);
// Answers that are made when the server goes have so long to be delivered.
constexpr std::chrono::seconds kDeliverWithin(5);
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

// New files are this user's alone for as long as this lives. The mask is the whole process's.
class PrivateFiles {
 public:
  PrivateFiles() : before_(::umask(0177)) {}
  ~PrivateFiles() { ::umask(before_); }
  PrivateFiles(const PrivateFiles&) = delete;
  PrivateFiles& operator=(const PrivateFiles&) = delete;

 private:
  mode_t before_;
};

// gRPC 1.51 goes down with its last server, and then waits up to 10 s for a poller of its own that
// a long write began. With one more user it stays up until the process ends.
void KeepGrpcUp() {
  static const bool kIsUp = (grpc_init(), true);
  static_cast<void>(kIsUp);
}

// gRPC logs why it can't listen and doesn't tell: try again by hand for the system's words.
absl::Status WhyNot(const ListenConfig& listen) {
  const std::string place = FormatListen(listen);
  if (!listen.socket_path.empty()) {
    return absl::UnavailableError(absl::StrFormat("can't listen at %s", place));
  }
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const std::string port = absl::StrFormat("%d", listen.port);
  if (const int error = ::getaddrinfo(listen.host.c_str(), port.c_str(), &hints, &found);
      error != 0) {
    return absl::UnavailableError(
        absl::StrFormat("can't listen at %s: %s", place, ::gai_strerror(error)));
  }
  const int fd = ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int error = fd < 0 || ::bind(fd, found->ai_addr, found->ai_addrlen) != 0 ? errno : 0;
  ::freeaddrinfo(found);
  if (fd >= 0) {
    ::close(fd);
  }
  return error == 0 ? absl::UnavailableError(absl::StrFormat("can't listen at %s", place))
                    : absl::ErrnoToStatus(error, absl::StrFormat("can't listen at %s", place));
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
                                                             Clock& clock) {
  // No make_unique: the constructor is private.
  std::unique_ptr<RpcServer> server(new RpcServer(config, std::move(facts), engine, clock));
  EBBTIDE_RETURN_IF_ERROR(server->Bind(config));
  server->SetHealth(true);
  return server;
}

absl::Status RpcServer::Bind(const ServerConfig& config) {
  if (config.listen.socket_path.empty()) {
    return Start(config);
  }
  EBBTIDE_ASSIGN_OR_RETURN(const SocketClaim claim, SocketClaim::Take(config.listen.socket_path));
  {
    const PrivateFiles private_files;
    EBBTIDE_RETURN_IF_ERROR(Start(config));
  }
  return claim.SetMode(config.listen.socket_mode);
}

absl::Status RpcServer::Start(const ServerConfig& config) {
  KeepGrpcUp();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = 0;
  const std::string place = FormatListen(config.listen);
  builder.AddListeningPort(place, grpc::InsecureServerCredentials(), &port);
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
  // Otherwise two daemons share a port and each call goes to either.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // One client alone can't hold all threads; what it calls beyond this waits on its own side.
  const auto calls_max = static_cast<int>(config.calls_in_flight_max);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS,
                             std::max(kSpareThreads / 2, calls_max / 2));
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> watchers;
  watchers.push_back(unread_.MakeWatcher());
  builder.experimental().SetInterceptorCreators(std::move(watchers));
  grpc::ResourceQuota quota("ebbtided");
  // Messages on their way in: beyond this gRPC stops reading, and cuts calls off.
  quota.Resize(BytesArrivingMax(config) + kGrpcOwnBytes);
  quota.SetMaxThreads(calls_max + static_cast<int>(kWatchersMax) + kSpareThreads);
  builder.SetResourceQuota(quota);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr || (config.listen.socket_path.empty() && port == 0)) {
    return WhyNot(config.listen);
  }
  ListenConfig listening = config.listen;
  if (listening.socket_path.empty()) {
    listening.port = static_cast<uint16_t>(port);
  }
  const std::string prefix = listening.socket_path.empty() ? "tcp:" : "";
  facts_.transports = {prefix + FormatListen(listening)};
  return absl::OkStatus();
}

RpcServer::~RpcServer() {
  if (server_ != nullptr) {
    server_->Shutdown(std::chrono::system_clock::now() + kDeliverWithin);
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
    SetHealth(admission_.StuckFor() < kStuckAfter && !engine_.is_device_lost());
  }
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
