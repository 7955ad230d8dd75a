// SPDX-License-Identifier: Apache-2.0
//
// Workers that stop reading make a real daemon keep their answers. Once they are gone, so is the
// memory.

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "ebbtide/v1/cache.grpc.pb.h"
#include "tests/integration/daemon_stand.h"
#include "tests/support/comes_true.h"
#include "tests/support/grpc_probe.h"
#include "tests/support/http2_call.h"

namespace ebbtide {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr int kHeadDim = 256, kChunk = 512;
constexpr uint64_t kTokens = 16 * 1024;  // 32 MiB of one head, in f32.

class FreedMemoryTest : public testing::Test {
 protected:
  FreedMemoryTest() {
    daemon_ = stand_.Serve(
        {"--config", stand_.WriteConfig("server: {listen: 'unix:" + socket() +
                                        "', threads: 1}\ndevice: {budget: 64MiB}\n"
                                        "host: {budget: 96MiB}\nrocksdb: {disabled: true}\n")},
        &said_);
    cache_ = v1::CacheService::NewStub(test::ConnectTo(said_.value("target", "unix:/nowhere")));
    v1::RegisterModelRequest model;
    model.set_model("m");
    model.mutable_geometry()->set_layers(1);
    model.mutable_geometry()->set_query_heads(1);
    model.mutable_geometry()->set_kv_heads(1);
    model.mutable_geometry()->set_head_dim(kHeadDim);
    model.mutable_geometry()->set_dtype(v1::DTYPE_F32);
    v1::OpenSequenceRequest open;
    open.set_sequence("a");
    open.set_model("m");
    open.set_policy("streaming");
    open.set_recall("off");
    open.set_chunk_tokens(kChunk);
    open.mutable_budget()->set_tokens(kChunk);
    grpc::ClientContext registers, opens;
    v1::RegisterModelResponse registered;
    v1::OpenSequenceResponse opened;
    EXPECT_TRUE(cache_->RegisterModel(&registers, model, &registered).ok());
    EXPECT_TRUE(cache_->OpenSequence(&opens, open, &opened).ok());
  }

  std::string socket() const { return stand_.path("e.sock"); }

  void Fill() {
    v1::AppendRequest request;
    request.set_phase(v1::PHASE_PREFILL);
    v1::AppendItem& item = *request.add_items();
    item.set_sequence("a");
    for (v1::Tensor* tensor : {item.mutable_k(), item.mutable_v()}) {
      tensor->set_dtype(v1::DTYPE_F32);
      for (const int64_t size : {kChunk, 1, kHeadDim}) tensor->add_shape(size);
      tensor->mutable_data()->resize(kChunk * kHeadDim * sizeof(float), '\x3e');
    }
    for (uint64_t first = 0; first < kTokens; first += kChunk) {
      item.set_first_index(first);
      grpc::ClientContext context;
      v1::AppendResponse response;
      const grpc::Status status = cache_->Append(&context, request, &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
      ASSERT_EQ(response.results(0).status().code(), 0) << response.results(0).status().message();
    }
  }

  // Without the host tier's arena.
  uint64_t HeapBytes() const {
    std::ifstream status("/proc/" + std::to_string(daemon_->pid()) + "/status");
    uint64_t kib = 0;
    for (std::string word; status >> word;) {
      if (word == "RssAnon:") status >> kib;
    }
    return kib << 10;
  }

  test::DaemonStand stand_;
  nlohmann::json said_;
  std::unique_ptr<test::DaemonProcess> daemon_;
  std::unique_ptr<v1::CacheService::Stub> cache_;
};

TEST_F(FreedMemoryTest, AnswersThatNobodyReadAreGivenBack) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "not run: the sanitizer keeps what is freed, to find who still uses it";
#endif
  Fill();
  const uint64_t before = HeapBytes();
  v1::ReadPagesRequest request;
  request.set_sequence("a");
  std::vector<std::unique_ptr<test::Http2Call>> calls;
  while (calls.size() < 12) {
    calls.push_back(std::make_unique<test::Http2Call>(
        socket(), "/ebbtide.v1.CacheService/ReadPages", request.SerializeAsString()));
    ASSERT_TRUE(calls.back()->Await(test::Http2Frame::kHeaders).has_value());
  }
  ASSERT_GT(HeapBytes(), before + 300 * kMiB);

  calls.clear();

  EXPECT_TRUE(test::ComesTrue([&] { return HeapBytes() < before + 64 * kMiB; }))
      << before / kMiB << " MiB before, " << HeapBytes() / kMiB << " MiB now";
}

}  // namespace
}  // namespace ebbtide
