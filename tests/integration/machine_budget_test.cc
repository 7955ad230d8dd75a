// SPDX-License-Identifier: Apache-2.0
//
// Budgets beside what the machine says: a real daemon is filled until it refuses, and at every look
// its folder and its memory are within what it was given. What it gives back is seen from outside
// too.

#include <algorithm>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "ebbtide/v1/cache.grpc.pb.h"
#include "ebbtide/v1/stats.grpc.pb.h"
#include "tests/integration/daemon_stand.h"
#include "tests/support/comes_true.h"
#include "tests/support/disk_use.h"
#include "tests/support/grpc_probe.h"

namespace ebbtide {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kDevice = 16 * kMiB, kHost = 32 * kMiB, kRocksdb = 128 * kMiB;

// What a daemon takes beside its budgets (docs/configuration.md). A sanitizer's shadow is not its
// own.
#if defined(__SANITIZE_ADDRESS__)
constexpr uint64_t kBesideBudgets = 1024 * kMiB;
#else
constexpr uint64_t kBesideBudgets = 64 * kMiB;
#endif

constexpr int kLayers = 4, kKvHeads = 4, kHeadDim = 64, kChunk = 256;

struct Memory {
  uint64_t resident = 0;
  uint64_t shared = 0;  // The host tier's arena.
};

class MachineBudgetTest : public testing::Test {
 protected:
  MachineBudgetTest() {
    daemon_ = stand_.Serve(
        {"--config",
         stand_.WriteConfig("server: {listen: 'unix:" + stand_.path("e.sock") +
                            "', threads: 2}\ndevice: {budget: 16MiB}\nhost: {budget: 32MiB}\n" +
                            "rocksdb: {path: " + folder() + ", budget: 128MiB}\n")},
        &said_);
    channel_ = test::ConnectTo(said_.value("target", "unix:/nowhere"));
    cache_ = v1::CacheService::NewStub(channel_);
    stats_ = v1::StatsService::NewStub(channel_);
    v1::RegisterModelRequest model;
    model.set_model("m");
    model.mutable_geometry()->set_layers(kLayers);
    model.mutable_geometry()->set_query_heads(kKvHeads);
    model.mutable_geometry()->set_kv_heads(kKvHeads);
    model.mutable_geometry()->set_head_dim(kHeadDim);
    model.mutable_geometry()->set_dtype(v1::DTYPE_F16);
    grpc::ClientContext context;
    v1::RegisterModelResponse registered;
    EXPECT_TRUE(cache_->RegisterModel(&context, model, &registered).ok());
  }

  std::string folder() const { return stand_.path("rocksdb"); }

  grpc::Status Open(const std::string& name) {
    v1::OpenSequenceRequest open;
    open.set_sequence(name);
    open.set_model("m");
    open.set_policy("h2o");  // Whose score state is the largest.
    open.mutable_budget()->set_tokens(256);
    open.set_chunk_tokens(kChunk);
    grpc::ClientContext context;
    v1::OpenSequenceResponse opened;
    return cache_->OpenSequence(&context, open, &opened);
  }

  // One layer's call.
  v1::ItemStatus Append(const std::string& name, int layer, uint64_t first) {
    v1::AppendRequest request;
    request.set_layer(static_cast<uint32_t>(layer));
    request.set_phase(v1::PHASE_PREFILL);
    v1::AppendItem& item = *request.add_items();
    item.set_sequence(name);
    item.set_first_index(first);
    for (v1::Tensor* tensor : {item.mutable_k(), item.mutable_v()}) {
      tensor->set_dtype(v1::DTYPE_F16);
      for (const int64_t size : {kChunk, kKvHeads, kHeadDim}) tensor->add_shape(size);
      std::string& bytes = *tensor->mutable_data();
      bytes.resize(kChunk * kKvHeads * kHeadDim * 2);
      for (size_t i = 0; i < bytes.size(); ++i) {
        bytes[i] = static_cast<char>(i % 2 == 0 ? i * 31 + first : 0x38 + i % 5);
      }
    }
    grpc::ClientContext context;
    v1::AppendResponse response;
    const grpc::Status status = cache_->Append(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.results_size() == 1 ? response.results(0).status() : v1::ItemStatus();
  }

  v1::GetStatsResponse Stats() {
    grpc::ClientContext context;
    v1::GetStatsResponse stats;
    EXPECT_TRUE(stats_->GetStats(&context, {}, &stats).ok());
    return stats;
  }

  Memory MemoryOf() const {
    std::ifstream status("/proc/" + std::to_string(daemon_->pid()) + "/status");
    Memory memory;
    for (std::string word; status >> word;) {
      uint64_t kib = 0;
      if (word == "VmRSS:" && status >> kib) memory.resident = kib << 10;
      if (word == "RssShmem:" && status >> kib) memory.shared = kib << 10;
    }
    EXPECT_GT(memory.resident, 0U);
    return memory;
  }

  // Everything is within its budget now.
  void Look() {
    ++looks_;
    const Memory memory = MemoryOf();
    most_resident_ = std::max(most_resident_, memory.resident);
    most_disk_ = std::max(most_disk_, test::DiskUseBytes(folder()));
    ASSERT_LE(test::DiskUseBytes(folder()), kRocksdb);
    ASSERT_LE(memory.shared, kHost);
    ASSERT_LE(memory.resident, kDevice + kHost + kBesideBudgets);
    const v1::GetStatsResponse stats = Stats();
    for (const v1::TierStats& tier : stats.tiers()) {
      ASSERT_LE(tier.used_bytes(), tier.budget_bytes());
    }
  }

  test::DaemonStand stand_;
  nlohmann::json said_;
  std::unique_ptr<test::DaemonProcess> daemon_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::CacheService::Stub> cache_;
  std::unique_ptr<v1::StatsService::Stub> stats_;
  int looks_ = 0;
  uint64_t most_resident_ = 0;
  uint64_t most_disk_ = 0;
};

TEST_F(MachineBudgetTest, HoldAtEveryLookUntilAllIsFullAndAreGivenBack) {
  const uint64_t disk_at_start = test::DiskUseBytes(folder());
  // The device fills up with sequences.
  std::vector<std::string> names;
  grpc::Status refused;
  while (refused.ok()) {
    names.push_back("sequence " + std::to_string(names.size()));
    refused = Open(names.back());
  }
  names.pop_back();
  ASSERT_GT(names.size(), 2U);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(refused.error_message(), AllOf(HasSubstr("B are free"), HasSubstr("16777216")));

  // The tiers below fill up with their tokens.
  v1::ItemStatus full;
  for (uint64_t first = 0; full.code() == 0; first += kChunk) {
    for (size_t i = 0; i < names.size() && full.code() == 0; ++i) {
      for (int layer = 0; layer < kLayers && full.code() == 0; ++layer) {
        full = Append(names[i], layer, first);
        Look();
      }
    }
  }
  EXPECT_EQ(full.code(), static_cast<int>(grpc::StatusCode::RESOURCE_EXHAUSTED)) << full.message();
  EXPECT_EQ(full.reason(), "LOWER_TIERS_FULL");
  EXPECT_THAT(full.message(), AllOf(HasSubstr("there is room for"), HasSubstr("rocksdb budget")));
  EXPECT_GE(looks_, 50);
  const v1::GetStatsResponse at_most = Stats();
  EXPECT_GT(at_most.tiers(0).used_bytes(), kDevice * 8 / 10);
  EXPECT_GT(at_most.tiers(1).used_bytes(), kHost * 7 / 10);
  EXPECT_GT(at_most.tiers(2).used_bytes(), kRocksdb * 8 / 10);  // Some are still on their way.

  for (const std::string& name : names) {
    grpc::ClientContext context;
    v1::CloseSequenceRequest close;
    close.set_sequence(name);
    v1::CloseSequenceResponse closed;
    EXPECT_TRUE(cache_->CloseSequence(&context, close, &closed).ok());
    Look();
  }
  v1::GetStatsResponse stats;
  ASSERT_TRUE(test::ComesTrue([&] {  // What carriers still read goes when they are done.
    stats = Stats();
    return stats.tiers(0).used_bytes() + stats.tiers(1).blocks() + stats.tiers(2).blocks() == 0;
  }));
  EXPECT_EQ(stats.tiers(1).used_bytes(), kHost / 8);  // Staging, for good.
  EXPECT_LE(test::DiskUseBytes(folder()), disk_at_start + 4 * kMiB);
  EXPECT_LE(MemoryOf().shared, kHost / 16 + kMiB);  // What is kept warm.
  RecordProperty("looks", looks_);
  RecordProperty("most_resident_mib", static_cast<int>(most_resident_ / kMiB));
  RecordProperty("most_disk_mib", static_cast<int>(most_disk_ / kMiB));
}

}  // namespace
}  // namespace ebbtide
