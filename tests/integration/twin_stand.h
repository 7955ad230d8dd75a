// SPDX-License-Identifier: Apache-2.0
//
// A real daemon with two sequences that are treated alike, so that a test which treats one of them
// badly as well can see whether that changed anything: what they hold and answer stays the same to
// the bit.

#pragma once

#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "gtest/gtest.h"

#include "ebbtide/v1/cache.grpc.pb.h"
#include "ebbtide/v1/stats.grpc.pb.h"
#include "tests/integration/daemon_stand.h"
#include "tests/support/comes_true.h"
#include "tests/support/grpc_probe.h"

namespace ebbtide::test {

inline constexpr int kLayers = 2, kQueryHeads = 2, kKvHeads = 1, kHeadDim = 8;
inline constexpr int kPage = 16, kBudget = 48, kChunk = 32;  // Tokens.

struct Outcome {
  grpc::StatusCode code = grpc::StatusCode::OK;
  std::string reason = {};
  friend bool operator==(const Outcome&, const Outcome&) = default;
  friend void PrintTo(const Outcome& outcome, std::ostream* out) {
    *out << outcome.code << " " << outcome.reason;
  }
};

inline Outcome OutcomeOf(const grpc::Status& status, const grpc::ClientContext& context) {
  return {status.error_code(), ReasonOf(context)};
}

inline float Number(int kind, uint64_t index, int layer, int i) {
  const auto x =
      static_cast<uint32_t>(kind * 7919 + layer * 131 + i) + static_cast<uint32_t>(index) * 31;
  return static_cast<float>((x * 2654435761U) >> 20) / 2048.0F - 1.0F;
}

inline void FillTensor(v1::Tensor& tensor, int kind, uint64_t first, int count, int layer,
                       int heads) {
  std::vector<float> numbers;
  for (int t = 0; t < count; ++t) {
    for (int i = 0; i < heads * kHeadDim; ++i) {
      numbers.push_back(Number(kind, first + static_cast<uint64_t>(t), layer, i));
    }
  }
  tensor.set_dtype(v1::DTYPE_F32);
  for (const int64_t size : {count, heads, kHeadDim}) tensor.add_shape(size);
  tensor.set_data(std::string(reinterpret_cast<const char*>(numbers.data()), numbers.size() * 4));
}

inline void SetFloat(v1::Tensor& tensor, size_t at, float value) {
  std::memcpy(tensor.mutable_data()->data() + at * 4, &value, 4);
}

// A good item of either kind of call, to be spoilt.
template <typename Item>
Item GoodItem(const std::string& sequence, int layer, uint64_t first, int count) {
  Item item;
  item.set_sequence(sequence);
  item.set_first_index(first);
  FillTensor(*item.mutable_k(), 1, first, count, layer, kKvHeads);
  FillTensor(*item.mutable_v(), 2, first, count, layer, kKvHeads);
  if constexpr (std::is_same_v<Item, v1::AttendItem>) {
    FillTensor(*item.mutable_q(), 3, first, count, layer, kQueryHeads);
  }
  return item;
}

// Two sequences, "victim" and "twin", that got the same calls.
class TwinTest : public testing::Test {
 protected:
  TwinTest() {
    daemon_ = stand_.Serve(
        {"--config", stand_.WriteConfig("server: {listen: 'unix:" + stand_.path("e.sock") +
                                        "', threads: 2, message_bytes_max: 1048576}\n"
                                        "device: {budget: 4MiB}\nhost: {budget: 8MiB}\n"
                                        "rocksdb: {path: " +
                                        stand_.path("rocksdb") + ", budget: 64MiB}\n")},
        &said_);
    channel_ = ConnectTo(said_.value("target", "unix:/nowhere"));
    cache_ = v1::CacheService::NewStub(channel_);
    stats_ = v1::StatsService::NewStub(channel_);
    EXPECT_EQ(Call(&v1::CacheService::Stub::RegisterModel, GoodModel()), Outcome{});
    for (const char* name : {"victim", "twin"}) {
      EXPECT_EQ(Call(&v1::CacheService::Stub::OpenSequence, GoodOpen(name)), Outcome{});
      for (uint64_t first : {0, 32}) Step(name, first, kChunk, v1::PHASE_PREFILL);
    }
    length_ = 64;
  }

  static v1::RegisterModelRequest GoodModel() {
    v1::RegisterModelRequest request;
    request.set_model("m");
    request.set_weights_fingerprint("w");
    v1::Geometry& geometry = *request.mutable_geometry();
    geometry.set_layers(kLayers);
    geometry.set_query_heads(kQueryHeads);
    geometry.set_kv_heads(kKvHeads);
    geometry.set_head_dim(kHeadDim);
    geometry.set_dtype(v1::DTYPE_F32);
    geometry.set_page_tokens(kPage);
    return request;
  }

  static v1::OpenSequenceRequest GoodOpen(const std::string& name) {
    v1::OpenSequenceRequest request;
    request.set_sequence(name);
    request.set_model("m");
    request.set_policy("h2o");
    request.set_recall("exact");
    request.mutable_budget()->set_tokens(kBudget);
    request.set_chunk_tokens(kChunk);
    return request;
  }

  template <typename Service, typename Request, typename Response>
  Outcome Call(grpc::Status (Service::*method)(grpc::ClientContext*, const Request&, Response*),
               const Request& request, Response* response = nullptr) {
    grpc::ClientContext context;
    Response answer;
    Response* const into = response != nullptr ? response : &answer;
    if constexpr (std::is_same_v<Service, v1::CacheService::Stub>) {
      return OutcomeOf((cache_.get()->*method)(&context, request, into), context);
    } else {
      return OutcomeOf((stats_.get()->*method)(&context, request, into), context);
    }
  }

  // The outcome of a batch's only item, or of the call where that failed as a whole.
  template <typename Request, typename Response>
  Outcome CallItem(grpc::Status (v1::CacheService::Stub::*method)(grpc::ClientContext*,
                                                                  const Request&, Response*),
                   const Request& request) {
    Response response;
    const Outcome outcome = Call(method, request, &response);
    if (outcome.code != grpc::StatusCode::OK || response.results_size() == 0) return outcome;
    const v1::ItemStatus& status = response.results(0).status();
    return {static_cast<grpc::StatusCode>(status.code()), status.reason()};
  }

  // A good step of every layer; what the last layer answered.
  v1::AttendResult Step(const std::string& name, uint64_t first, int count, v1::Phase phase) {
    v1::AttendResponse response;
    for (int layer = 0; layer < kLayers; ++layer) {
      v1::AttendRequest request;
      request.set_layer(static_cast<uint32_t>(layer));
      request.set_phase(phase);
      *request.add_items() = GoodItem<v1::AttendItem>(name, layer, first, count);
      response.Clear();
      EXPECT_EQ(Call(&v1::CacheService::Stub::Attend, request, &response), Outcome{});
      EXPECT_EQ(response.results(0).status().code(), 0) << response.results(0).status().message();
    }
    AwaitSeals(name);
    return response.results_size() > 0 ? response.results(0) : v1::AttendResult();
  }

  // Until every complete block is sealed: when its slots come free decides where the next tokens
  // lie, and so in which order sums are rounded.
  void AwaitSeals(const std::string& name) {
    v1::DescribeSequenceRequest request;
    request.set_sequence(name);
    EXPECT_TRUE(ComesTrue([&] {
      v1::DescribeSequenceResponse response;
      EXPECT_EQ(Call(&v1::StatsService::Stub::DescribeSequence, request, &response), Outcome{});
      return response.summary().tokens().open() <=
             response.summary().committed() % kPage * kLayers * kKvHeads;
    }));
  }

  // All that is known of a sequence, but for when it was called and how far carriers are.
  std::string Describe(const std::string& name) {
    std::string all;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      v1::DescribeSequenceRequest request;
      request.set_sequence(name);
      request.set_with_lanes(true);
      request.set_with_tokens(true);
      request.set_layer(layer);
      v1::DescribeSequenceResponse response;
      EXPECT_EQ(Call(&v1::StatsService::Stub::DescribeSequence, request, &response), Outcome{});
      response.mutable_summary()->clear_sequence();
      response.mutable_summary()->clear_idle_ms();
      response.mutable_summary()->clear_tokens();
      for (v1::TokenDescription& token : *response.mutable_tokens()) token.clear_tier();
      all += response.SerializeAsString();
    }
    return all;
  }

  // One good step of both, after which they must be the same.
  void ExpectTwins(const std::string& after) {
    for (const char* name : {"victim", "twin"}) AwaitSeals(name);
    ASSERT_TRUE(Describe("victim") == Describe("twin")) << after;
    const v1::AttendResult victim = Step("victim", length_, 1, v1::PHASE_DECODE);
    const v1::AttendResult twin = Step("twin", length_, 1, v1::PHASE_DECODE);
    ++length_;
    ASSERT_TRUE(victim.output().data() == twin.output().data()) << after;
    ASSERT_EQ(victim.committed(), twin.committed()) << after;
    ASSERT_EQ(victim.replayed(), twin.replayed()) << after;
    ASSERT_TRUE(Describe("victim") == Describe("twin")) << after;
  }

  DaemonStand stand_;
  nlohmann::json said_;
  std::unique_ptr<DaemonProcess> daemon_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::CacheService::Stub> cache_;
  std::unique_ptr<v1::StatsService::Stub> stats_;
  uint64_t length_ = 0;
};

}  // namespace ebbtide::test
