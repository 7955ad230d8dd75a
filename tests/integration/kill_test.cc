// SPDX-License-Identifier: Apache-2.0
//
// Processes that end without a word: a worker in the middle of its prompt, a daemon in the middle
// of sealing. What stays behind is reclaimed, and the next daemon starts on it, empty, and says so.

#include <atomic>
#include <csignal>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "ebbtide/v1/cache.grpc.pb.h"
#include "ebbtide/v1/stats.grpc.pb.h"
#include "tests/integration/daemon_stand.h"
#include "tests/support/comes_true.h"
#include "tests/support/disk_use.h"
#include "tests/support/grpc_probe.h"
#include "tests/support/random_seed.h"

namespace ebbtide {
namespace {

using test::DaemonProcess;
using testing::Contains;
using testing::HasSubstr;

constexpr int kLayers = 2, kHeads = 2, kHeadDim = 64, kChunk = 64;

class KillTest : public testing::Test {
 protected:
  void Serve(const std::string& more = "") {
    daemon_ = stand_.Serve(
        {"--config",
         stand_.WriteConfig("server: {listen: 'unix:" + stand_.path("e.sock") +
                            "', threads: 2}\ndevice: {budget: 4MiB}\nhost: {budget: 2MiB}\n" +
                            "rocksdb: {path: " + stand_.path("rocksdb") + ", budget: 256MiB}\n" +
                            more)},
        &said_);
    channel_ = test::ConnectTo(said_.value("target", "unix:/nowhere"));
    cache_ = v1::CacheService::NewStub(channel_);
    stats_ = v1::StatsService::NewStub(channel_);
  }

  v1::GetStatsResponse Stats() {
    grpc::ClientContext context;
    v1::GetStatsResponse stats;
    EXPECT_TRUE(stats_->GetStats(&context, {}, &stats).ok()) << stand_.Stderr();
    return stats;
  }

  void Open() {
    v1::RegisterModelRequest model;
    model.set_model("m");
    model.mutable_geometry()->set_layers(kLayers);
    model.mutable_geometry()->set_query_heads(kHeads);
    model.mutable_geometry()->set_kv_heads(kHeads);
    model.mutable_geometry()->set_head_dim(kHeadDim);
    model.mutable_geometry()->set_dtype(v1::DTYPE_F32);
    v1::OpenSequenceRequest open;
    open.set_sequence("a");
    open.set_model("m");
    open.set_policy("streaming");
    open.mutable_budget()->set_tokens(64);
    open.set_chunk_tokens(kChunk);
    grpc::ClientContext registering, opening;
    v1::RegisterModelResponse registered;
    v1::OpenSequenceResponse opened;
    ASSERT_TRUE(cache_->RegisterModel(&registering, model, &registered).ok());
    ASSERT_TRUE(cache_->OpenSequence(&opening, open, &opened).ok());
  }

  static std::string Bytes(uint64_t first) {
    std::string bytes(kChunk * kHeads * kHeadDim * 4, '\0');
    for (size_t i = 0; i < bytes.size(); i += 4) {
      bytes[i] = static_cast<char>(first + i / 4);  // Small denormals, all finite.
    }
    return bytes;
  }

  bool Append(uint64_t first) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      v1::AppendRequest request;
      request.set_layer(layer);
      request.set_phase(v1::PHASE_PREFILL);
      v1::AppendItem& item = *request.add_items();
      item.set_sequence("a");
      item.set_first_index(first);
      for (v1::Tensor* tensor : {item.mutable_k(), item.mutable_v()}) {
        tensor->set_dtype(v1::DTYPE_F32);
        for (const int64_t size : {kChunk, kHeads, kHeadDim}) tensor->add_shape(size);
        tensor->set_data(Bytes(first));
      }
      grpc::ClientContext context;
      v1::AppendResponse response;
      if (!cache_->Append(&context, request, &response).ok()) return false;
      if (response.results(0).status().code() != 0) return false;
    }
    return true;
  }

  test::DaemonStand stand_;
  nlohmann::json said_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::CacheService::Stub> cache_;
  std::unique_ptr<v1::StatsService::Stub> stats_;
};

TEST_F(KillTest, WhatADeadWorkerLeftIdlesOutWithItsIncompleteTokens) {
  Serve("sequences: {idle_timeout_ms: 2000}\n");
  DaemonProcess worker({.program = EBBCTL_PATH,
                        .arguments = {"replay", EBBTIDE_TRACES "/smollm2-opticks-256.safetensors",
                                      "--policy", "h2o", "--budget", "48", "--recall", "exact",
                                      "--socket", "unix:" + stand_.path("e.sock")},
                        .environment = {},
                        .stderr_file = stand_.path("worker")});
  ASSERT_TRUE(test::ComesTrue([&] { return Stats().answers() >= 4; }));
  ASSERT_EQ(Stats().refused_size(), 0);

  worker.Signal(SIGKILL);

  EXPECT_EQ(worker.WaitForEnd(), 128 + SIGKILL);
  ASSERT_EQ(Stats().sequences(), 1U);
  v1::GetStatsResponse stats;
  // The daemon looks around once a second; what carriers still read goes when they are done.
  ASSERT_TRUE(test::ComesTrue([&] {
    stats = Stats();
    return stats.sequences() + stats.tiers(0).used_bytes() + stats.tiers(1).blocks() +
               stats.tiers(2).blocks() ==
           0;
  }));
  EXPECT_EQ(stats.tokens_forgotten().at("IDLE"), stats.tokens_appended());
  EXPECT_EQ(test::HealthOf(channel_, ""), "SERVING");
}

TEST_F(KillTest, DaemonKilledWhileItSealsIsFollowedByOneThatStartsEmpty) {
  std::mt19937_64 random(test::RandomSeed());
  std::string boot_id;
  for (int round = 0; round < 5; ++round) {
    Serve();
    ASSERT_TRUE(said_.is_object()) << stand_.Stderr();
    EXPECT_NE(said_["boot_id"], boot_id);
    boot_id = said_["boot_id"];
    grpc::ClientContext context;
    v1::GetServerInfoResponse info;
    ASSERT_TRUE(stats_->GetServerInfo(&context, {}, &info).ok());
    EXPECT_THAT(info.notes(), Contains(HasSubstr("rocksdb tier starts empty")));
    const v1::GetStatsResponse at_start = Stats();
    EXPECT_EQ(at_start.sequences(), 0U);
    EXPECT_EQ(at_start.tiers(2).blocks(), 0U);
    EXPECT_LT(test::DiskUseBytes(stand_.path("rocksdb")), 1U << 20);
    Open();

    // A worker that appends for as long as it is answered.
    std::atomic<uint64_t> appended = 0;
    std::thread worker([&] {
      while (Append(appended)) appended += kChunk;
    });
    const uint64_t enough = 10 + random() % 40;
    EXPECT_TRUE(test::ComesTrue([&] { return Stats().blocks_moved_down() >= enough; }));
    daemon_->Signal(SIGKILL);
    worker.join();

    EXPECT_EQ(daemon_->WaitForEnd(), 128 + SIGKILL);
    EXPECT_GT(appended, 0U);
    EXPECT_GT(test::DiskUseBytes(stand_.path("rocksdb")), 1U << 20);
  }
  Serve();
  Open();
  for (uint64_t first = 0; first < 16 * kChunk; first += kChunk) ASSERT_TRUE(Append(first));
  v1::ReadPagesRequest request;
  request.set_sequence("a");
  grpc::ClientContext context;
  v1::ReadPagesResponse response;
  ASSERT_TRUE(cache_->ReadPages(&context, request, &response).ok());
  ASSERT_EQ(response.pages_size(), 16 * kChunk / 32);
  for (const v1::Page& page : response.pages()) {
    ASSERT_EQ(page.state(), v1::PAGE_STATE_OK);
    const uint64_t in_chunk = page.first_index() % kChunk;
    const std::string sent = Bytes(page.first_index() - in_chunk);
    for (size_t t = 0; t < page.tokens(); ++t) {
      const size_t row = kHeadDim * 4;
      ASSERT_EQ(page.k().substr(t * row, row), sent.substr((in_chunk + t) * kHeads * row, row));
    }
  }
}

}  // namespace
}  // namespace ebbtide
