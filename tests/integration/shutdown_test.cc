// SPDX-License-Identifier: Apache-2.0
//
// SIGTERM to a real daemon while it answers: what is in progress is finished and arrives whole,
// what comes after is turned away by name, and the process ends as asked.

#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/blocking_counter.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "ebbtide/v1/cache.grpc.pb.h"
#include "ebbtide/v1/stats.grpc.pb.h"
#include "tests/integration/daemon_stand.h"
#include "tests/support/comes_true.h"
#include "tests/support/grpc_probe.h"
#include "tests/support/http2_call.h"

namespace ebbtide {
namespace {

using test::Http2Frame;
using testing::HasSubstr;

constexpr int kHeadDim = 256, kQueryHeads = 16, kChunk = 512, kPage = 32;
constexpr uint64_t kTokensMax = 1 << 17;

struct Answer {
  grpc::Status status;
  std::string reason = {};
};

class ShutdownTest : public testing::Test {
 protected:
  ShutdownTest() {
    daemon_ = stand_.Serve(
        {"--config",
         stand_.WriteConfig("server: {listen: 'unix:" + socket() +
                            "', threads: 1, drain_ms: 600000, call_deadline_ms: 600000}\n"
                            "device: {budget: 256MiB}\nhost: {budget: 1GiB}\n"
                            "rocksdb: {disabled: true}\n")},
        &said_);
    channel_ = Connect();
    cache_ = v1::CacheService::NewStub(channel_);
    v1::RegisterModelRequest model;
    model.set_model("m");
    model.mutable_geometry()->set_layers(1);
    model.mutable_geometry()->set_query_heads(kQueryHeads);
    model.mutable_geometry()->set_kv_heads(1);
    model.mutable_geometry()->set_head_dim(kHeadDim);
    model.mutable_geometry()->set_dtype(v1::DTYPE_F16);
    v1::RegisterModelResponse registered;
    EXPECT_TRUE(Call(&v1::CacheService::Stub::RegisterModel, model, &registered).status.ok());
    v1::OpenSequenceRequest open;
    open.set_sequence("a");
    open.set_model("m");
    open.set_policy("streaming");
    open.set_recall("off");
    open.mutable_budget()->set_tokens(kTokensMax);
    v1::OpenSequenceResponse opened;
    const Answer answer = Call(&v1::CacheService::Stub::OpenSequence, open, &opened);
    EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
  }

  std::string socket() const { return stand_.path("e.sock"); }
  std::shared_ptr<grpc::Channel> Connect() {
    return test::ConnectTo(said_.value("target", "unix:/nowhere"));
  }

  template <typename Request, typename Response>
  Answer Call(grpc::Status (v1::CacheService::Stub::*method)(grpc::ClientContext*, const Request&,
                                                             Response*),
              const Request& request, Response* response) {
    grpc::ClientContext context;
    Answer answer{.status = (cache_.get()->*method)(&context, request, response)};
    answer.reason = test::ReasonOf(context);
    return answer;
  }

  // A chunk of `heads` heads whose numbers differ, f16 of about ±1.
  static void FillTensor(v1::Tensor& tensor, int heads) {
    tensor.set_dtype(v1::DTYPE_F16);
    for (const int64_t size : {kChunk, heads, kHeadDim}) tensor.add_shape(size);
    std::string& data = *tensor.mutable_data();
    for (uint32_t i = 0; i < static_cast<uint32_t>(kChunk * heads * kHeadDim); ++i) {
      const uint32_t drawn = i * 2654435761U;
      data += static_cast<char>(drawn >> 24);
      data += static_cast<char>(0x38 | (drawn >> 16 & 0x83));
    }
  }

  void AppendUntil(uint64_t length) {
    v1::AppendRequest request;
    request.set_phase(v1::PHASE_PREFILL);
    v1::AppendItem& item = *request.add_items();
    item.set_sequence("a");
    FillTensor(*item.mutable_k(), 1);
    FillTensor(*item.mutable_v(), 1);
    for (; length_ < length; length_ += kChunk) {
      item.set_first_index(length_);
      v1::AppendResponse response;
      const Answer answer = Call(&v1::CacheService::Stub::Append, request, &response);
      ASSERT_TRUE(answer.status.ok()) << answer.status.error_message();
      ASSERT_EQ(response.results(0).status().code(), 0) << response.results(0).status().message();
    }
  }

  // Attention of the newest chunk over all there is, once no other call holds the layer; its
  // output.
  std::string Attend() {
    v1::AttendRequest request;
    request.set_phase(v1::PHASE_DECODE);
    v1::AttendItem& item = *request.add_items();
    item.set_sequence("a");
    item.set_first_index(length_ - kChunk);
    FillTensor(*item.mutable_q(), kQueryHeads);
    v1::AttendResponse response;
    EXPECT_TRUE(test::ComesTrue([&] {
      response.Clear();
      const Answer answer = Call(&v1::CacheService::Stub::Attend, request, &response);
      EXPECT_TRUE(answer.status.ok()) << answer.status.error_message();
      return response.results_size() == 0 ||
             response.results(0).status().reason() != "CALL_IN_FLIGHT";
    }));
    if (response.results_size() == 0) return "";
    EXPECT_EQ(response.results(0).status().code(), 0) << response.results(0).status().message();
    return response.results(0).output().data();
  }

  // Makes the sequence so long that Attend takes two seconds or more here; its output. Nothing from
  // outside holds a call that attends, so this measures (docs/testing.md).
  std::string MakeAttendLong() {
    std::string output;
    std::chrono::duration<double> taken(0);
    for (uint64_t length = 2 * kChunk; taken < std::chrono::seconds(2); length *= 2) {
      EXPECT_LE(length, kTokensMax) << "this machine attends too fast";
      if (length > kTokensMax) break;
      AppendUntil(length);
      const auto begin = std::chrono::steady_clock::now();
      output = Attend();
      taken = std::chrono::steady_clock::now() - begin;
    }
    return output;
  }

  // Of a page, while the sequence is free or is not.
  Answer ReadOnePage() {
    v1::ReadPagesRequest request;
    request.set_sequence("a");
    request.set_page_count(1);
    v1::ReadPagesResponse response;
    return Call(&v1::CacheService::Stub::ReadPages, request, &response);
  }

  // Asks again until the answer has this reason, or `is_over`.
  bool AwaitReason(const std::string& reason, const std::function<bool()>& is_over) {
    bool has_come = false;
    return test::ComesTrue([&] {
             has_come = ReadOnePage().reason == reason;
             return has_come || is_over();
           }) &&
           has_come;
  }

  // From then on answers have five seconds to be taken.
  void AwaitNobodyListening() const {
    ASSERT_TRUE(test::ComesTrue([this] { return !std::filesystem::exists(socket()); }));
  }

  void ExpectEndAsAsked() {
    EXPECT_EQ(daemon_->WaitForEnd(), 0) << daemon_->ReadStderr();
    EXPECT_FALSE(std::filesystem::exists(socket()));
    EXPECT_THAT(daemon_->ReadStderr(), HasSubstr("\"event\":\"stopped\""));
    EXPECT_THAT(daemon_->ReadStderr(), testing::Not(HasSubstr("five seconds more")));
  }

  test::DaemonStand stand_;
  nlohmann::json said_;
  std::unique_ptr<test::DaemonProcess> daemon_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::CacheService::Stub> cache_;
  uint64_t length_ = 0;
};

TEST_F(ShutdownTest, CallInProgressIsFinishedWhileNewOnesAreTurnedAway) {
  const std::string output = MakeAttendLong();
  std::future<std::string> answer = std::async(std::launch::async, [this] { return Attend(); });
  const auto is_answered = [&] {
    return answer.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  ASSERT_TRUE(AwaitReason("CALL_IN_FLIGHT", is_answered));

  daemon_->Signal(SIGTERM);

  ASSERT_TRUE(AwaitReason("SHUTTING_DOWN", is_answered));
  EXPECT_EQ(ReadOnePage().status.error_code(), grpc::StatusCode::UNAVAILABLE);
  const std::shared_ptr<grpc::Channel> late = Connect();
  EXPECT_EQ(test::HealthOf(late, ""), "NOT_SERVING");
  std::string response, reason;
  test::CallRaw(late, "/ebbtide.v1.CacheService/Append", "", &response, &reason);
  EXPECT_EQ(reason, "SHUTTING_DOWN");
  EXPECT_TRUE(test::CallRaw(late, "/ebbtide.v1.StatsService/GetStats", "", &response).ok());
  EXPECT_FALSE(is_answered());  // All this was while it was in progress.
  EXPECT_EQ(answer.get(), output);
  ExpectEndAsAsked();
}

TEST_F(ShutdownTest, AnswerOnItsWayArrivesWhole) {
  constexpr uint64_t kPages = 4 * kChunk / kPage;  // 2 MiB.
  AppendUntil(4 * kChunk);
  v1::ReadPagesRequest request;
  request.set_sequence("a");
  test::Http2Call call(socket(), "/ebbtide.v1.CacheService/ReadPages", request.SerializeAsString());
  ASSERT_TRUE(call.Await(Http2Frame::kHeaders).has_value());  // It is made, and can't be sent yet.

  daemon_->Signal(SIGTERM);

  AwaitNobodyListening();
  // A while later, and yet before it is given up.
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(call.RoundTrip());
  call.TakeAnswer();
  std::string message, trailers;
  while (const std::optional<Http2Frame> frame = call.Next()) {
    if (frame->type == Http2Frame::kData) message += frame->payload;
    if (frame->type == Http2Frame::kHeaders) trailers = frame->payload;
  }
  EXPECT_THAT(trailers, HasSubstr(std::string("grpc-status") + '\1' + '0'));
  v1::ReadPagesResponse pages;
  ASSERT_TRUE(message.size() > 5 && pages.ParseFromString(message.substr(5)));
  ASSERT_EQ(pages.pages_size(), kPages);
  for (const v1::Page& page : pages.pages()) {
    EXPECT_EQ(page.k().size() + page.v().size(), 2 * kPage * kHeadDim * 2);
  }
  ExpectEndAsAsked();
}

// Whoever calls all the while is answered until nobody is there.
TEST_F(ShutdownTest, EveryCallIsAnsweredOrFindsNobody) {
  constexpr int kWorkers = 4;
  absl::BlockingCounter begun(kWorkers);
  std::vector<std::thread> workers;
  for (int i = 0; i < kWorkers; ++i) {
    workers.emplace_back([this, &begun] {
      const auto cache = v1::CacheService::NewStub(Connect());
      v1::CloseSequenceRequest request;
      request.set_sequence("nobody's");
      bool is_first = true;
      while (true) {
        grpc::ClientContext context;
        v1::CloseSequenceResponse response;
        const grpc::Status status = cache->CloseSequence(&context, request, &response);
        if (std::exchange(is_first, false)) begun.DecrementCount();
        if (status.error_code() == grpc::StatusCode::NOT_FOUND) continue;
        EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAVAILABLE) << status.error_message();
        if (context.GetServerTrailingMetadata().count("ebbtide-reason") == 0) break;
      }
    });
  }
  begun.Wait();

  daemon_->Signal(SIGTERM);

  for (std::thread& worker : workers) worker.join();
  ExpectEndAsAsked();
}

// gRPC alone would wait for it.
TEST_F(ShutdownTest, ConnectionThatDoesNothingKeepsNobodyWaiting) {
  AppendUntil(kChunk);  // The connection that did this is there still.
  const auto begin = std::chrono::steady_clock::now();

  daemon_->Signal(SIGTERM);

  ExpectEndAsAsked();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(3));
}

// A worker that hangs does not keep the daemon from its end.
TEST_F(ShutdownTest, AnswerThatNobodyTakesIsGivenUp) {
  AppendUntil(kChunk);
  v1::ReadPagesRequest request;
  request.set_sequence("a");
  test::Http2Call call(socket(), "/ebbtide.v1.CacheService/ReadPages", request.SerializeAsString());
  ASSERT_TRUE(call.Await(Http2Frame::kHeaders).has_value());

  daemon_->Signal(SIGTERM);

  ExpectEndAsAsked();
}

// Not even where the connection takes no more.
TEST_F(ShutdownTest, ConnectionThatNobodyReadsIsGivenUp) {
  AppendUntil(4 * kChunk);  // 2 MiB, where a socket takes less.
  v1::ReadPagesRequest request;
  request.set_sequence("a");
  test::Http2Call call(socket(), "/ebbtide.v1.CacheService/ReadPages", request.SerializeAsString());
  ASSERT_TRUE(call.Await(Http2Frame::kHeaders).has_value());
  call.TakeAnswer();
  ASSERT_TRUE(call.Await(Http2Frame::kData).has_value());

  daemon_->Signal(SIGTERM);

  ExpectEndAsAsked();
}

// Not even one that comes when calls in progress are waited for no more.
TEST_F(ShutdownTest, SecondSignalCutsNoAnswerOff) {
  AppendUntil(kChunk);
  v1::ReadPagesRequest request;
  request.set_sequence("a");
  test::Http2Call call(socket(), "/ebbtide.v1.CacheService/ReadPages", request.SerializeAsString());
  ASSERT_TRUE(call.Await(Http2Frame::kHeaders).has_value());
  daemon_->Signal(SIGTERM);
  AwaitNobodyListening();

  daemon_->Signal(SIGTERM);

  for (int i = 0; i < 200; ++i) ASSERT_TRUE(call.RoundTrip());
  ExpectEndAsAsked();
}

}  // namespace
}  // namespace ebbtide
