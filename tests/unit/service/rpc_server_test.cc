// SPDX-License-Identifier: Apache-2.0
//
// The server on a real socket over a scripted engine: what callers see of bounds, deadlines,
// errors, health and shutdown.

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <filesystem>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "ebbtide/v1/cache.grpc.pb.h"
#include "ebbtide/v1/stats.grpc.pb.h"
#include "service/reason.h"
#include "service/rpc/listener.h"
#include "service/rpc/server.h"
#include "tests/support/comes_true.h"
#include "tests/support/fake_clock.h"
#include "tests/support/grpc_probe.h"
#include "tests/support/http2_call.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"
#include "tests/unit/service/scripted_engine.h"

namespace ebbtide::service {
namespace {

using test::HealthOf;
using test::IsOk;
using test::StatusIs;
using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;
using testing::StartsWith;

constexpr auto kHourOfPatience = std::chrono::hours(1);

v1::AppendRequest AppendOf(const std::vector<std::string>& sequences) {
  v1::AppendRequest request;
  request.set_phase(v1::PHASE_DECODE);
  for (const std::string& sequence : sequences) {
    v1::AppendItem& item = *request.add_items();
    item.set_sequence(sequence);
    for (v1::Tensor* tensor : {item.mutable_k(), item.mutable_v()}) {
      tensor->set_dtype(v1::DTYPE_F16);
      tensor->add_shape(1);
      tensor->add_shape(1);
      tensor->add_shape(4);
      tensor->set_data(std::string(8, '\0'));
    }
  }
  return request;
}

class RpcServerTest : public testing::Test {
 protected:
  RpcServerTest() {
    config_.listen.socket_path = folder_.path() / "e.sock";
    config_.message_bytes_max = 1 << 20;
    config_.calls_in_flight_max = 2;
    config_.call_deadline = absl::Seconds(30);
  }

  void Start(absl::Duration silence_max = RpcServer::kSilenceMax) {
    ServerFacts facts;
    facts.version = "1.2.3";
    facts.boot_id = "b00t";
    facts.backend = "cpu";
    facts.started = clock_.SinceStart();
    absl::StatusOr<std::unique_ptr<RpcServer>> server =
        RpcServer::Listen(config_, facts, engine_, clock_, silence_max);
    ASSERT_THAT(server, IsOk());
    server_ = *std::move(server);
    channel_ = test::ConnectTo(server_->target());
    cache_ = v1::CacheService::NewStub(channel_);
    stats_ = v1::StatsService::NewStub(channel_);
  }

  // One call without a deadline; its reason goes to reason_.
  grpc::Status Append(const v1::AppendRequest& request, v1::AppendResponse* response) {
    grpc::ClientContext context;
    const grpc::Status status = cache_->Append(&context, request, response);
    reason_ = test::ReasonOf(context);
    return status;
  }

  v1::GetStatsResponse GetStats() {
    grpc::ClientContext context;
    v1::GetStatsResponse response;
    EXPECT_TRUE(stats_->GetStats(&context, {}, &response).ok());
    return response;
  }

  // Calls of Step wait for this.
  void BlockSteps() {
    engine_.step = [this](const StepCall&, std::span<const StepItem> items) {
      if (!release_.HasBeenNotified()) blocked_.DecrementCount();
      release_.WaitForNotification();
      return std::vector<StepAnswer>(items.size());
    };
  }

  // Fills both places for calls with calls that wait for release_; join them after.
  std::vector<std::thread> FillPlaces() {
    BlockSteps();
    std::vector<std::thread> callers;
    for (int i = 0; i < 2; ++i) {
      callers.emplace_back([this] {
        grpc::ClientContext context;
        v1::AppendResponse response;
        EXPECT_TRUE(cache_->Append(&context, AppendOf({"a"}), &response).ok());
      });
    }
    blocked_.Wait();
    return callers;
  }

  const test::TempFolder folder_;
  test::FakeClock clock_;
  ScriptedEngine engine_;
  ServerConfig config_;
  absl::BlockingCounter blocked_{2};
  absl::Notification release_;
  std::string reason_;
  std::unique_ptr<RpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::CacheService::Stub> cache_;
  std::unique_ptr<v1::StatsService::Stub> stats_;
};

TEST_F(RpcServerTest, HealthIsServedByName) {
  Start();

  EXPECT_EQ(HealthOf(channel_, ""), "SERVING");
  EXPECT_EQ(HealthOf(channel_, "ebbtide.v1.CacheService"), "SERVING");
  EXPECT_EQ(HealthOf(channel_, "ebbtide.v1.StatsService"), "SERVING");
  EXPECT_EQ(HealthOf(channel_, "ebbtide.v1.NoService"), "NOT_FOUND");
}

TEST_F(RpcServerTest, ReflectionListsTheServices) {
  Start();

  EXPECT_THAT(test::ReflectedServices(channel_),
              AllOf(HasSubstr("ebbtide.v1.CacheService"), HasSubstr("ebbtide.v1.StatsService"),
                    HasSubstr("grpc.reflection.v1alpha.ServerReflection")));
}

TEST_F(RpcServerTest, ServerInfoTellsTheLimitsInForce) {
  Start();
  clock_.Advance(absl::Milliseconds(1234));

  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  ASSERT_TRUE(stats_->GetServerInfo(&context, {}, &info).ok());

  EXPECT_EQ(info.version(), "1.2.3");
  EXPECT_EQ(info.boot_id(), "b00t");
  EXPECT_TRUE(info.simulated_device());
  EXPECT_THAT(info.transports(), ElementsAre("unix:" + config_.listen.socket_path));
  EXPECT_EQ(info.message_bytes_max(), 1 << 20);
  EXPECT_EQ(info.chunk_tokens_max(), 512);
  EXPECT_EQ(info.uptime_ms(), 1234);
}

TEST_F(RpcServerTest, ErrorOfTheEngineCarriesItsReason) {
  engine_.close_sequence = [](std::string_view) {
    return Refuse(absl::StatusCode::kNotFound, "SEQUENCE_UNKNOWN", "no sequence \"a\"");
  };
  Start();

  grpc::ClientContext context;
  v1::CloseSequenceRequest request;
  request.set_sequence("a");
  v1::CloseSequenceResponse response;
  const grpc::Status status = cache_->CloseSequence(&context, request, &response);

  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(status.error_message(), "no sequence \"a\"");
  EXPECT_THAT(context.GetServerTrailingMetadata(),
              Contains(Pair("ebbtide-reason", "SEQUENCE_UNKNOWN")));
  EXPECT_EQ(GetStats().refused_size(), 0);  // The engine counts its own.
}

TEST_F(RpcServerTest, RefusedItemIsAnsweredBesideTheOthersAndCounted) {
  engine_.step = [](const StepCall&, std::span<const StepItem> items) {
    EXPECT_EQ(items.size(), 1);
    EXPECT_EQ(items[0].sequence, "b");
    std::vector<StepAnswer> answers(1);
    answers[0].length = 5;
    answers[0].committed = 4;
    return answers;
  };
  engine_.get_stats = [] {
    Stats stats;
    stats.refused["SIZE_MISMATCH"] = 10;
    return stats;
  };
  Start();
  v1::AppendRequest request = AppendOf({"a", "b"});
  request.mutable_items(0)->mutable_k()->clear_data();

  v1::AppendResponse response;
  ASSERT_TRUE(Append(request, &response).ok());

  EXPECT_EQ(response.boot_id(), "b00t");
  ASSERT_EQ(response.results_size(), 2);
  EXPECT_EQ(response.results(0).status().code(), 3);
  EXPECT_EQ(response.results(0).status().reason(), "SIZE_MISMATCH");
  EXPECT_EQ(response.results(1).status().code(), 0);
  EXPECT_EQ(response.results(1).length(), 5);
  EXPECT_EQ(response.results(1).committed(), 4);
  EXPECT_EQ(GetStats().refused().at("SIZE_MISMATCH"), 11);
}

TEST_F(RpcServerTest, MessageThatCannotBeReadAsAWholeIsAnError) {
  Start();

  v1::AppendResponse response;
  const grpc::Status status = Append(AppendOf({}), &response);

  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(reason_, "BATCH_SIZE");
  EXPECT_EQ(GetStats().refused().at("BATCH_SIZE"), 1);
}

TEST_F(RpcServerTest, CallWithoutADeadlineGetsTheServers) {
  absl::Duration deadline;
  engine_.step = [&](const StepCall& call, std::span<const StepItem> items) {
    deadline = call.deadline;
    return std::vector<StepAnswer>(items.size());
  };
  Start();

  v1::AppendResponse response;
  ASSERT_TRUE(Append(AppendOf({"a"}), &response).ok());

  EXPECT_EQ(deadline, clock_.SinceStart() + absl::Seconds(30));
}

TEST_F(RpcServerTest, CallersDeadlineReachesTheEngine) {
  absl::Duration deadline;
  engine_.step = [&](const StepCall& call, std::span<const StepItem> items) {
    deadline = call.deadline;
    return std::vector<StepAnswer>(items.size());
  };
  Start();

  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kHourOfPatience);
  v1::AppendResponse response;
  ASSERT_TRUE(cache_->Append(&context, AppendOf({"a"}), &response).ok());

  // gRPC rounds a timeout up on its way, by a hundredth at most; the call has an hour to arrive.
  EXPECT_LE(deadline, clock_.SinceStart() + absl::Hours(1) * 1.01);
  EXPECT_GT(deadline, clock_.SinceStart() + absl::Seconds(30));
}

TEST_F(RpcServerTest, CallOverTheBoundIsBusyWhileHealthAndStatsAnswer) {
  Start();
  std::vector<std::thread> callers = FillPlaces();

  v1::AppendResponse response;
  const grpc::Status status = Append(AppendOf({"a"}), &response);

  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(reason_, "SERVER_BUSY");
  EXPECT_EQ(HealthOf(channel_, ""), "SERVING");
  EXPECT_EQ(GetStats().refused().at("SERVER_BUSY"), 1);
  release_.Notify();
  for (std::thread& caller : callers) caller.join();
  EXPECT_TRUE(Append(AppendOf({"a"}), &response).ok());
}

TEST_F(RpcServerTest, WatcherOverTheBoundIsToldWhatHelpsWatchers) {
  absl::BlockingCounter asked(8);
  engine_.get_stats = [&] {
    if (!release_.HasBeenNotified()) asked.DecrementCount();
    release_.WaitForNotification();
    return Stats();
  };
  Start();
  std::vector<std::thread> watchers;
  for (int i = 0; i < 8; ++i) watchers.emplace_back([this] { GetStats(); });
  asked.Wait();

  // On a connection of its own: one connection's calls beyond eight wait on their own side.
  const auto stats = v1::StatsService::NewStub(test::ConnectTo(server_->target()));
  grpc::ClientContext context;
  v1::GetStatsResponse response;
  const grpc::Status status = stats->GetStats(&context, {}, &response);

  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(status.error_message(),
            "8 calls are in progress, the limit; call again later, or have fewer watchers ask at a "
            "time");
  release_.Notify();
  for (std::thread& watcher : watchers) watcher.join();
}

TEST_F(RpcServerTest, HealthTellsOfCallsThatNeverEnd) {
  Start();
  std::vector<std::thread> callers = FillPlaces();

  clock_.Advance(absl::Seconds(9));
  server_->RefreshHealth();
  EXPECT_EQ(HealthOf(channel_, ""), "SERVING");
  clock_.Advance(absl::Seconds(1));
  server_->RefreshHealth();
  EXPECT_EQ(HealthOf(channel_, ""), "NOT_SERVING");
  EXPECT_EQ(HealthOf(channel_, "ebbtide.v1.StatsService"), "SERVING");

  release_.Notify();
  for (std::thread& caller : callers) caller.join();
  server_->RefreshHealth();
  EXPECT_EQ(HealthOf(channel_, ""), "SERVING");
}

TEST_F(RpcServerTest, HealthTellsOfADeviceThatIsLost) {
  Start();
  engine_.device_is_lost = true;

  server_->RefreshHealth();

  EXPECT_EQ(HealthOf(channel_, ""), "NOT_SERVING");
  EXPECT_EQ(HealthOf(channel_, "ebbtide.v1.StatsService"), "SERVING");
}

TEST_F(RpcServerTest, HealthTellsThatNobodyCanConnect) {
  Start();
  ListenConfig place = config_.listen;
  place.socket_path = folder_.path() / "other.sock";
  absl::StatusOr<std::unique_ptr<Listener>> other = Listener::Open(place);
  ASSERT_THAT(other, IsOk());
  std::filesystem::rename(place.socket_path, config_.listen.socket_path);
  const auto becomes = [this](const std::string& health) {
    return test::ComesTrue([&] {
      server_->RefreshHealth();
      return HealthOf(channel_, "") == health;
    });
  };

  EXPECT_TRUE(becomes("NOT_SERVING"));
  other->reset();
  EXPECT_TRUE(becomes("SERVING"));
  EXPECT_EQ(HealthOf(test::ConnectTo(server_->target()), ""), "SERVING");
}

TEST_F(RpcServerTest, ConnectionThatSaysNothingIsEnded) {
  Start(absl::Milliseconds(200));
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  config_.listen.socket_path.copy(address.sun_path, sizeof address.sun_path - 1);
  ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const timeval patience = {.tv_sec = 30, .tv_usec = 0};
  ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);

  char bytes[256];
  ssize_t count = 1;
  while (count > 0) count = ::read(fd, bytes, sizeof bytes);

  EXPECT_EQ(count, 0);  // Rather than that patience ended.
  ::close(fd);
}

TEST_F(RpcServerTest, ShutdownRefusesTheNewAndFinishesTheOld) {
  Start();
  std::vector<std::thread> callers = FillPlaces();

  server_->StopAdmitting();

  v1::AppendResponse response;
  EXPECT_EQ(Append(AppendOf({"a"}), &response).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(reason_, "SHUTTING_DOWN");
  EXPECT_EQ(HealthOf(channel_, ""), "NOT_SERVING");
  server_->RefreshHealth();
  EXPECT_EQ(HealthOf(channel_, ""), "NOT_SERVING");
  EXPECT_EQ(GetStats().refused().at("SHUTTING_DOWN"), 1);
  EXPECT_FALSE(server_->WaitIdle(absl::ZeroDuration()));
  release_.Notify();
  EXPECT_TRUE(server_->WaitIdle(absl::InfiniteDuration()));
  for (std::thread& caller : callers) caller.join();  // Their answers were OK.
}

TEST_F(RpcServerTest, OversizedMessageIsResourceExhausted) {
  Start();
  v1::AppendRequest request = AppendOf({"a"});
  request.mutable_items(0)->mutable_k()->set_data(std::string(1 << 20, 'x'));

  v1::AppendResponse response;
  EXPECT_EQ(Append(request, &response).error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST_F(RpcServerTest, AnswerThatWouldNotFitIsRefusedBeforeAnythingChanges) {
  engine_.step = [](const StepCall&, std::span<const StepItem> items) {
    ADD_FAILURE() << "carried out";
    return std::vector<StepAnswer>(items.size());
  };
  Start();
  v1::AttendRequest request;
  request.set_phase(v1::PHASE_DECODE);
  v1::AttendItem& item = *request.add_items();
  item.set_sequence("a");
  item.set_output_dtype(v1::DTYPE_F32);
  item.mutable_q()->set_dtype(v1::DTYPE_F16);
  for (const int64_t size : {512, 4, 128}) item.mutable_q()->add_shape(size);
  item.mutable_q()->set_data(std::string(512 * 4 * 128 * 2, '\0'));

  grpc::ClientContext context;
  v1::AttendResponse response;
  const grpc::Status status = cache_->Attend(&context, request, &response);

  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(context.GetServerTrailingMetadata(),
              Contains(Pair("ebbtide-reason", "ANSWER_TOO_LARGE")));
}

TEST_F(RpcServerTest, UnknownMethodIsUnimplemented) {
  Start();

  std::string response;
  EXPECT_EQ(test::CallRaw(channel_, "/ebbtide.v1.CacheService/Steal", "", &response).error_code(),
            grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(RpcServerTest, ListGoesOnWhereThePageEnded) {
  engine_.list_sequences = [](std::string_view after, size_t limit) {
    std::vector<SequenceSummary> found;
    for (const char* name : {"a", "b", "c"}) {
      if (name > after && found.size() < limit) found.emplace_back().sequence = name;
    }
    return found;
  };
  Start();

  std::vector<std::string> names;
  v1::ListSequencesRequest request;
  request.set_page_size(2);
  int pages = 0;
  do {
    grpc::ClientContext context;
    v1::ListSequencesResponse response;
    ASSERT_TRUE(stats_->ListSequences(&context, request, &response).ok());
    for (const v1::SequenceSummary& summary : response.sequences()) {
      names.push_back(summary.sequence());
    }
    request.set_page_token(response.next_page_token());
    ++pages;
  } while (!request.page_token().empty());

  EXPECT_THAT(names, ElementsAre("a", "b", "c"));
  EXPECT_EQ(pages, 2);
}

TEST_F(RpcServerTest, RegisterModelAnswersBytesOfPageAndRecord) {
  Start();
  v1::RegisterModelRequest request;
  request.set_model("m");
  request.mutable_geometry()->set_layers(2);
  request.mutable_geometry()->set_query_heads(4);
  request.mutable_geometry()->set_kv_heads(2);
  request.mutable_geometry()->set_head_dim(64);
  request.mutable_geometry()->set_dtype(v1::DTYPE_F16);

  grpc::ClientContext context;
  v1::RegisterModelResponse response;
  ASSERT_TRUE(cache_->RegisterModel(&context, request, &response).ok());

  EXPECT_EQ(response.page_bytes(), 2 * 32 * 64 * 2);
  EXPECT_GT(response.record_bytes(), 4 * response.page_bytes());
  EXPECT_EQ(response.record_bytes() % 4096, 0);
  EXPECT_EQ(response.geometry().page_tokens(), 32);
}

TEST_F(RpcServerTest, SocketIsPrivateAndGoneAfterwards) {
  Start();
  struct stat info = {};
  ASSERT_EQ(::stat(config_.listen.socket_path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600);

  server_.reset();

  EXPECT_FALSE(std::filesystem::exists(config_.listen.socket_path));
}

TEST_F(RpcServerTest, SocketIsOpenToTheGroupWhereAsked) {
  config_.listen.socket_mode = 0660;
  Start();

  struct stat info = {};
  ASSERT_EQ(::stat(config_.listen.socket_path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0660);
}

TEST_F(RpcServerTest, SecondServerOnALiveSocketIsRefusedAndTheFirstGoesOn) {
  Start();

  EXPECT_THAT(RpcServer::Listen(config_, ServerFacts(), engine_, clock_),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("is listened at by")));

  v1::AppendResponse response;
  EXPECT_TRUE(Append(AppendOf({"a"}), &response).ok());
}

TEST_F(RpcServerTest, PortInUseIsRefusedInTheSystemsWords) {
  config_.listen.socket_path = "";
  config_.listen.host = "127.0.0.1";
  config_.listen.port = 0;
  Start();
  const std::string target = server_->target();
  EXPECT_THAT(server_->facts().transports, ElementsAre("tcp:" + target));
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(target.substr(target.rfind(':') + 1), &port));
  ASSERT_GT(port, 0);

  config_.listen.port = static_cast<uint16_t>(port);
  EXPECT_THAT(RpcServer::Listen(config_, ServerFacts(), engine_, clock_),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(StartsWith("can't listen at " + target), HasSubstr("in use"))));
}

// Port scanners, health checks that only connect, TLS on a plain port: connections that never
// become calls.
TEST_F(RpcServerTest, ConnectionsThatAreNotCallsLeaveTheServerWell) {
  config_.listen.socket_path = "";
  config_.listen.host = "127.0.0.1";
  Start();
  const std::string target = server_->target();
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  int port = 0;
  ASSERT_TRUE(absl::SimpleAtoi(target.substr(target.rfind(':') + 1), &port));
  address.sin_port = htons(static_cast<uint16_t>(port));
  const std::string greetings[] = {"", "\x16\x03\x01", "GET / HTTP/1.1\r\n\r\n",
                                   std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11),
                                   "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + std::string(64, '\xff')};

  for (int i = 0; i < 500; ++i) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ASSERT_EQ(::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    const std::string& greeting = greetings[static_cast<size_t>(i) % std::size(greetings)];
    EXPECT_EQ(::send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(greeting.size()));
    ::close(fd);
  }

  v1::AppendResponse response;
  EXPECT_TRUE(Append(AppendOf({"a"}), &response).ok());
  EXPECT_EQ(HealthOf(channel_, ""), "SERVING");
}

TEST_F(RpcServerTest, AnswerThatNobodyReadsIsCutOff) {
  Start();
  test::Http2Call call(config_.listen.socket_path, "/ebbtide.v1.StatsService/GetServerInfo", "");

  // Not before its time, however long that takes here.
  EXPECT_EQ(server_->CutOffUnread(), 0);
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  int cut_off = 0;
  while (cut_off == 0 && std::chrono::steady_clock::now() < give_up) {
    clock_.Advance(absl::Seconds(11));  // The answer may be under way by now.
    cut_off = server_->CutOffUnread();
  }
  EXPECT_EQ(cut_off, 1);
  EXPECT_EQ(server_->CutOffUnread(), 0);
  EXPECT_EQ(GetStats().refused().at("ANSWER_UNREAD"), 1);

  const std::optional<test::Http2Frame> reset = call.Await(test::Http2Frame::kReset);
  ASSERT_TRUE(reset.has_value());
  EXPECT_EQ(reset->stream, 1);
}

TEST_F(RpcServerTest, AnswersThatWereReadAreForgotten) {
  Start();
  for (int i = 0; i < 20; ++i) GetStats();
  clock_.Advance(absl::Hours(1));

  // A call's end may be a moment behind its answer, where its thread had to wait for a CPU.
  EXPECT_LT(server_->CutOffUnread(), 10);
}

}  // namespace
}  // namespace ebbtide::service
