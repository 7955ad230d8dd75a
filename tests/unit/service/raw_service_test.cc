// SPDX-License-Identifier: Apache-2.0
//
// Requests that are not what they should be, as bytes on a real socket, to every method of both
// services: each is refused with a reason before anything is made of it.

#include <thread>

#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "grpcpp/generic/generic_stub.h"
#include "gtest/gtest.h"

#include "ebbtide/v1/cache.grpc.pb.h"
#include "ebbtide/v1/stats.grpc.pb.h"
#include "service/rpc/server.h"
#include "tests/support/fake_clock.h"
#include "tests/support/grpc_probe.h"
#include "tests/support/repeated.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"
#include "tests/unit/service/scripted_engine.h"

namespace ebbtide::service {
namespace {

using test::Repeated;
using testing::HasSubstr;

constexpr size_t kMessageBytesMax = 1 << 20;

std::vector<std::string> Methods() {
  std::vector<std::string> methods;
  for (const char* name : {kCacheServiceName, kStatsServiceName}) {
    const auto& service =
        *google::protobuf::DescriptorPool::generated_pool()->FindServiceByName(name);
    for (int i = 0; i < service.method_count(); ++i) {
      methods.push_back(std::string("/") + name + "/" + service.method(i)->name());
    }
  }
  return methods;
}

v1::AppendRequest GoodAppend() {
  v1::AppendRequest request;
  request.set_phase(v1::PHASE_DECODE);
  v1::AppendItem& item = *request.add_items();
  item.set_sequence("a");
  for (v1::Tensor* tensor : {item.mutable_k(), item.mutable_v()}) {
    tensor->set_dtype(v1::DTYPE_F16);
    for (const int64_t size : {1, 1, 4}) tensor->add_shape(size);
    tensor->set_data(std::string(8, '\0'));
  }
  return request;
}

// A call as a worker sees its end.
struct End {
  grpc::StatusCode code;
  std::string reason;
  std::string message;
};

class RawServiceTest : public testing::Test {
 protected:
  RawServiceTest() {
    config_.listen.socket_path = folder_.path() / "e.sock";
    config_.message_bytes_max = kMessageBytesMax;
    config_.calls_in_flight_max = 16;
    config_.call_deadline = absl::Seconds(30);
    absl::StatusOr<std::unique_ptr<RpcServer>> server =
        RpcServer::Listen(config_, ServerFacts(), engine_, clock_);
    EXPECT_THAT(server, test::IsOk());
    server_ = *std::move(server);
    channel_ = test::ConnectTo(server_->target());
  }

  End Call(const std::string& method, const std::string& request) {
    End end;
    std::string response;
    const grpc::Status status = test::CallRaw(channel_, method, request, &response, &end.reason);
    end.code = status.error_code();
    end.message = status.error_message();
    return end;
  }
  End Append(const std::string& request) {
    return Call("/ebbtide.v1.CacheService/Append", request);
  }

  // How often calls were refused for this reason.
  uint64_t Refused(const std::string& reason) {
    const auto stats = v1::StatsService::NewStub(channel_);
    grpc::ClientContext context;
    v1::GetStatsResponse response;
    EXPECT_TRUE(stats->GetStats(&context, {}, &response).ok());
    const auto found = response.refused().find(reason);
    return found == response.refused().end() ? 0 : found->second;
  }

  const test::TempFolder folder_;
  test::FakeClock clock_;
  ScriptedEngine engine_;
  ServerConfig config_;
  std::unique_ptr<RpcServer> server_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(RawServiceTest, EveryMethodOfTheServicesIsThere) {
  EXPECT_EQ(Methods().size(), 11);
  for (const std::string& method : Methods()) {
    const End end = Call(method, "");
    EXPECT_TRUE(end.code == grpc::StatusCode::OK || !end.reason.empty()) << method << end.message;
  }
}

TEST_F(RawServiceTest, MessageThatWouldSwellIsRefusedByEveryMethod) {
  const std::string kinds[] = {
      {14 << 3, 0},                // An unknown number,
      {14 << 3 | 2, 0},            // text,
      {14 << 3 | 3, 14 << 3 | 4},  // and group.
  };
  uint64_t calls = 0;
  for (const std::string& method : Methods()) {
    for (const std::string& kind : kinds) {
      const End end = Call(method, Repeated(kind, kMessageBytesMax / kind.size()));
      EXPECT_EQ(end.code, grpc::StatusCode::INVALID_ARGUMENT) << method << end.message;
      EXPECT_EQ(end.reason, "TOO_MANY_FIELDS") << method;
      EXPECT_THAT(end.message, AllOf(HasSubstr("of 1 MiB"), HasSubstr("over 12 MiB")));
      ++calls;
    }
  }
  EXPECT_EQ(Refused("TOO_MANY_FIELDS"), calls);
}

TEST_F(RawServiceTest, MillionsOfItemsAreRefused) {
  for (const char* method : {"Append", "Attend"}) {
    const End end = Call(std::string("/ebbtide.v1.CacheService/") + method,
                         Repeated({4 << 3 | 2, 0}, kMessageBytesMax / 2));
    EXPECT_EQ(end.code, grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_EQ(end.reason, "TOO_MANY_FIELDS");
  }
  // As many as a call may have, and one more, are counted by the call's own check.
  EXPECT_EQ(Append({2 << 3, 1}).reason, "BATCH_SIZE");
  EXPECT_EQ(Append(std::string({2 << 3, 1}) + Repeated({4 << 3 | 2, 0}, 4097)).reason,
            "BATCH_SIZE");
}

TEST_F(RawServiceTest, BytesThatAreNoMessageAreRefusedByEveryMethod) {
  uint64_t calls = 0;
  for (const std::string& method : Methods()) {
    const End end = Call(method, "\x0a");  // Ends behind a tag.
    EXPECT_EQ(end.code, grpc::StatusCode::INVALID_ARGUMENT) << method << end.message;
    EXPECT_EQ(end.reason, "BAD_MESSAGE") << method;
    EXPECT_THAT(end.message, HasSubstr("these 1 B are no ebbtide.v1.")) << method;
    ++calls;
  }
  const End text = Call("/ebbtide.v1.CacheService/CloseSequence", "\x0a\x01\xff");
  EXPECT_EQ(text.reason, "BAD_MESSAGE");  // No UTF-8, which the parser alone sees.
  EXPECT_EQ(Refused("BAD_MESSAGE"), calls + 1);
}

TEST_F(RawServiceTest, CallWithoutAMessageIsRefused) {
  grpc::GenericStub stub(channel_);
  grpc::ClientContext context;
  grpc::CompletionQueue queue;
  const auto next = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  const auto call = stub.PrepareCall(&context, "/ebbtide.v1.CacheService/Append", &queue);
  call->StartCall(nullptr);
  ASSERT_TRUE(next());
  call->WritesDone(nullptr);
  ASSERT_TRUE(next());
  grpc::Status status;
  call->Finish(&status, nullptr);
  ASSERT_TRUE(next());

  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_THAT(context.GetServerTrailingMetadata(),
              testing::Contains(testing::Pair("ebbtide-reason", "BAD_MESSAGE")));
}

TEST_F(RawServiceTest, MessageOverTheLimitIsRefusedWithItsReason) {
  v1::AppendRequest request = GoodAppend();
  std::string& data = *request.mutable_items(0)->mutable_k()->mutable_data();
  data.append(kMessageBytesMax - request.ByteSizeLong(), '\0');
  data.resize(data.size() - (request.ByteSizeLong() - kMessageBytesMax));
  ASSERT_EQ(request.ByteSizeLong(), kMessageBytesMax);
  EXPECT_EQ(Append(request.SerializeAsString()).code, grpc::StatusCode::OK);

  data.push_back('\0');
  const End end = Append(request.SerializeAsString());

  EXPECT_EQ(end.code, grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(end.reason, "MESSAGE_TOO_LARGE");
  EXPECT_THAT(end.message, HasSubstr("over the limit of 1 MiB"));
  EXPECT_EQ(Append(std::string(3 * kMessageBytesMax, '\0')).reason, "MESSAGE_TOO_LARGE");
  EXPECT_EQ(Refused("MESSAGE_TOO_LARGE"), 2);
}

// More than may be on its way: gRPC cuts the call off, and what is left of it is nobody's mistake.
TEST_F(RawServiceTest, MessageThatIsCutOffOnItsWayIsNoBadOne) {
  for (int i = 0; i < 3; ++i) {
    const End end = Append(std::string(80 * kMessageBytesMax, '\0'));
    EXPECT_EQ(end.code, grpc::StatusCode::RESOURCE_EXHAUSTED) << end.message;
    EXPECT_EQ(end.reason, "");
  }
  EXPECT_EQ(Refused("BAD_MESSAGE"), 0);
}

TEST_F(RawServiceTest, PackedMessageIsNotUnpacked) {
  const auto cache = v1::CacheService::NewStub(channel_);
  v1::AppendRequest request = GoodAppend();
  request.mutable_items(0)->mutable_k()->set_data(std::string(1 << 19, '\0'));  // Packs well.
  for (const grpc_compression_algorithm algorithm : {GRPC_COMPRESS_DEFLATE, GRPC_COMPRESS_GZIP}) {
    grpc::ClientContext context;
    context.set_compression_algorithm(algorithm);
    v1::AppendResponse response;

    EXPECT_EQ(cache->Append(&context, request, &response).error_code(),
              grpc::StatusCode::UNIMPLEMENTED);
  }
}

// While calls hold all that there is, another's message is not even looked at.
TEST_F(RawServiceTest, CallIsAdmittedBeforeItsMessageIsRead) {
  absl::BlockingCounter blocked(16);
  absl::Notification release;
  engine_.step = [&](const StepCall&, std::span<const StepItem> items) {
    if (!release.HasBeenNotified()) blocked.DecrementCount();
    release.WaitForNotification();
    return std::vector<StepAnswer>(items.size());
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < 16; ++i) {
    callers.emplace_back([this] {
      std::string response;  // A connection each: one alone may not hold all places.
      EXPECT_TRUE(test::CallRaw(test::ConnectTo(server_->target()),
                                "/ebbtide.v1.CacheService/Append", GoodAppend().SerializeAsString(),
                                &response)
                      .ok());
    });
  }
  blocked.Wait();

  EXPECT_EQ(Append("\x0a").reason, "SERVER_BUSY");
  server_->StopAdmitting();
  EXPECT_EQ(Append("\x0a").reason, "SHUTTING_DOWN");
  release.Notify();
  for (std::thread& caller : callers) caller.join();
}

// Four of the largest messages, and 32 MiB for what they become.
TEST_F(RawServiceTest, RequestsInProgressCountAsWhatTheyBecome) {
  absl::BlockingCounter blocked(4);
  absl::Notification release;
  engine_.step = [&](const StepCall&, std::span<const StepItem> items) {
    if (!release.HasBeenNotified()) blocked.DecrementCount();
    release.WaitForNotification();
    return std::vector<StepAnswer>(items.size());
  };
  // 160 kB that become 7.6 MB.
  const std::string scattered = GoodAppend().SerializeAsString() + Repeated({14 << 3, 0}, 80'000);
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] { EXPECT_EQ(Append(scattered).code, grpc::StatusCode::OK); });
  }
  blocked.Wait();

  const End fifth = Append(scattered);

  EXPECT_EQ(fifth.code, grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(fifth.reason, "SERVER_BUSY");
  EXPECT_THAT(fifth.message, HasSubstr("this request, once it is parsed, of 7"));
  release.Notify();
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace ebbtide::service
