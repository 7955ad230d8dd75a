// SPDX-License-Identifier: Apache-2.0
//
// Each way in which a call that is no step can be wrong, to a real daemon: the exact code and
// reason, and a twin that shows that nothing changed. Two sequences get the same good calls; one of
// them gets every bad call besides, and both hold and answer the same to the bit.

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "ebbtide/v1/cache.grpc.pb.h"
#include "ebbtide/v1/stats.grpc.pb.h"
#include "tests/integration/twin_stand.h"

namespace ebbtide::test {
namespace {

using grpc::StatusCode;

constexpr StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint64_t kSequenceTokensMax = 1 << 24;

class BadCallsTest : public TwinTest {};

TEST_F(BadCallsTest, RegisterModel) {
  using Request = v1::RegisterModelRequest;
  const Outcome geometry{StatusCode::INVALID_ARGUMENT, "GEOMETRY_INVALID"};
  const Outcome name{StatusCode::INVALID_ARGUMENT, "NAME_INVALID"};
  const Outcome dtype{StatusCode::INVALID_ARGUMENT, "DTYPE_UNKNOWN"};
  const Outcome differs{StatusCode::FAILED_PRECONDITION, "GEOMETRY_DIFFERS"};
  const struct {
    std::string what;
    Outcome expected;
    std::function<void(Request&)> spoil;
  } cases[] = {
      {"no name", name, [](Request& r) { r.clear_model(); }},
      {"long name", name, [](Request& r) { r.set_model(std::string(257, 'a')); }},
      {"unprintable name", name, [](Request& r) { r.set_model("\x7f"); }},
      {"long fingerprint", name,
       [](Request& r) { r.set_weights_fingerprint(std::string(257, 'a')); }},
      {"no geometry", dtype, [](Request& r) { r.clear_geometry(); }},
      {"no dtype", dtype, [](Request& r) { r.mutable_geometry()->clear_dtype(); }},
      {"no layers", geometry, [](Request& r) { r.mutable_geometry()->set_layers(0); }},
      {"too many layers", geometry, [](Request& r) { r.mutable_geometry()->set_layers(1025); }},
      {"no kv heads", geometry, [](Request& r) { r.mutable_geometry()->set_kv_heads(0); }},
      {"more kv than query heads", geometry,
       [](Request& r) { r.mutable_geometry()->set_kv_heads(3); }},
      {"query heads that do not divide", geometry,
       [](Request& r) {
         r.mutable_geometry()->set_kv_heads(2);
         r.mutable_geometry()->set_query_heads(3);
       }},
      {"groups of 17", geometry, [](Request& r) { r.mutable_geometry()->set_query_heads(17); }},
      {"no channels", geometry, [](Request& r) { r.mutable_geometry()->set_head_dim(0); }},
      {"too many channels", geometry, [](Request& r) { r.mutable_geometry()->set_head_dim(257); }},
      {"numbers beyond an int", geometry,
       [](Request& r) { r.mutable_geometry()->set_head_dim(0xFFFFFFFF); }},
      {"pages of 8", geometry, [](Request& r) { r.mutable_geometry()->set_page_tokens(8); }},
      {"pages of 48", geometry, [](Request& r) { r.mutable_geometry()->set_page_tokens(48); }},
      {"NaN scale", geometry, [](Request& r) { r.mutable_geometry()->set_scale(kNaN); }},
      {"infinite scale", geometry, [](Request& r) { r.mutable_geometry()->set_scale(kInfinity); }},
      {"negative scale", geometry, [](Request& r) { r.mutable_geometry()->set_scale(-1); }},
      {"a block beyond any record", geometry,
       [](Request& r) {
         r.set_model("vast");
         r.mutable_geometry()->set_layers(1024);
         r.mutable_geometry()->set_query_heads(1024);
         r.mutable_geometry()->set_kv_heads(1024);
       }},
      {"other layers under a known name", differs,
       [](Request& r) { r.mutable_geometry()->set_layers(3); }},
      {"another scale under a known name", differs,
       [](Request& r) { r.mutable_geometry()->set_scale(1); }},
      {"another fingerprint under a known name", differs,
       [](Request& r) { r.set_weights_fingerprint("v"); }},
  };
  for (const auto& bad : cases) {
    Request request = GoodModel();
    bad.spoil(request);

    EXPECT_EQ(Call(&v1::CacheService::Stub::RegisterModel, request), bad.expected) << bad.what;
    ExpectTwins(bad.what);
  }
}

struct BadOpen {
  std::string what;
  Outcome expected;
  std::function<void(v1::OpenSequenceRequest&)> spoil;
};

std::vector<BadOpen> BadWords() {
  std::vector<BadOpen> cases = {
      {"no name",
       {kInvalid, "NAME_INVALID"},
       [](v1::OpenSequenceRequest& r) { r.clear_sequence(); }},
      {"no model", {kInvalid, "NAME_INVALID"}, [](v1::OpenSequenceRequest& r) { r.clear_model(); }},
      {"unknown model",
       {StatusCode::NOT_FOUND, "MODEL_UNKNOWN"},
       [](v1::OpenSequenceRequest& r) { r.set_model("n"); }},
      {"unknown policy",
       {kInvalid, "POLICY_INVALID"},
       [](v1::OpenSequenceRequest& r) { r.set_policy("lru"); }},
      {"weighting without mass",
       {kInvalid, "POLICY_INVALID"},
       [](v1::OpenSequenceRequest& r) { r.set_policy("keydiff+caote"); }},
      {"attention without queries",
       {kInvalid, "POLICY_NEEDS_QUERIES"},
       [](v1::OpenSequenceRequest& r) { r.set_queries(v1::QUERIES_NONE); }},
      {"unknown queries",
       {kInvalid, "QUERIES_UNKNOWN"},
       [](v1::OpenSequenceRequest& r) { r.set_queries(static_cast<v1::Queries>(5)); }},
      {"a time-out of more than 30 days",
       {kInvalid, "TIMEOUT_TOO_LONG"},
       [](v1::OpenSequenceRequest& r) { r.set_idle_timeout_ms(uint64_t{31} * 24 * 3600 * 1000); }},
  };
  for (const std::string text :
       {"soft", "bounded", "bounded()", "bounded(0)", "bounded(1)", "bounded(-0.1)", "bounded(nan)",
        "bounded(inf)", "bounded(0.1", "bounded(0.1,0.2)", "estimated(x)", "exact(1)", "off,off"}) {
    cases.push_back({"recall " + text,
                     {kInvalid, "RECALL_INVALID"},
                     [text](v1::OpenSequenceRequest& r) { r.set_recall(text); }});
  }
  for (const std::string text : {"oneshot", "blockwise", "blockwise(0)", "blockwise(513)"}) {
    cases.push_back({"prefill " + text,
                     {kInvalid, "PREFILL_INVALID"},
                     [text](v1::OpenSequenceRequest& r) { r.set_prefill(text); }});
  }
  return cases;
}

std::vector<BadOpen> BadBudgets() {
  const auto percent = [](double value, uint32_t of) {
    return [=](v1::OpenSequenceRequest& r) {
      r.mutable_budget()->mutable_percent()->set_percent(value);
      r.mutable_budget()->mutable_percent()->set_of_tokens(of);
    };
  };
  return {
      {"no budget",
       {kInvalid, "BUDGET_INVALID"},
       [](v1::OpenSequenceRequest& r) { r.clear_budget(); }},
      {"budget of 0",
       {kInvalid, "BUDGET_INVALID"},
       [](v1::OpenSequenceRequest& r) { r.mutable_budget()->set_tokens(0); }},
      {"0 %", {kInvalid, "BUDGET_INVALID"}, percent(0, 100)},
      {"101 %", {kInvalid, "BUDGET_INVALID"}, percent(101, 100)},
      {"NaN %", {kInvalid, "BUDGET_INVALID"}, percent(kNaN, 100)},
      {"infinite %", {kInvalid, "BUDGET_INVALID"}, percent(kInfinity, 100)},
      {"a share of nothing", {kInvalid, "BUDGET_INVALID"}, percent(50, 0)},
      {"budget of the protected tokens",  // 4 sinks and a page.
       {kInvalid, "BUDGET_TOO_SMALL"},
       [](v1::OpenSequenceRequest& r) { r.mutable_budget()->set_tokens(20); }},
      {"budget beyond any sequence",
       {kInvalid, "BUDGET_TOO_LARGE"},
       [](v1::OpenSequenceRequest& r) { r.mutable_budget()->set_tokens(kSequenceTokensMax + 1); }},
      {"chunks beyond the server's",
       {kInvalid, "BUDGET_TOO_LARGE"},
       [](v1::OpenSequenceRequest& r) { r.set_chunk_tokens(513); }},
      {"more than the device holds",
       {StatusCode::RESOURCE_EXHAUSTED, "DEVICE_FULL"},
       [](v1::OpenSequenceRequest& r) { r.mutable_budget()->set_tokens(200'000); }},
      {"more than the host keeps of it",
       {StatusCode::RESOURCE_EXHAUSTED, "LOWER_TIERS_FULL"},
       [](v1::OpenSequenceRequest& r) { r.mutable_budget()->set_tokens(kSequenceTokensMax); }},
  };
}

TEST_F(BadCallsTest, OpenSequence) {
  using Request = v1::OpenSequenceRequest;
  for (const auto& cases : {BadWords(), BadBudgets()}) {
    for (const BadOpen& bad : cases) {
      Request request = GoodOpen("new");
      bad.spoil(request);

      EXPECT_EQ(Call(&v1::CacheService::Stub::OpenSequence, request), bad.expected) << bad.what;
      ExpectTwins(bad.what);
    }
  }
  for (const auto& spoil : std::vector<std::function<void(Request&)>>{
           [](Request& r) { r.set_policy("tova"); }, [](Request& r) { r.set_recall("off"); },
           [](Request& r) { r.set_prefill("exact"); },
           [](Request& r) { r.mutable_budget()->set_tokens(kBudget + 1); },
           [](Request& r) { r.set_chunk_tokens(kChunk - 1); },
           [](Request& r) { r.set_idle_timeout_ms(5000); }}) {
    Request request = GoodOpen("victim");
    spoil(request);

    EXPECT_EQ(Call(&v1::CacheService::Stub::OpenSequence, request),
              (Outcome{StatusCode::FAILED_PRECONDITION, "SEQUENCE_DIFFERS"}));
    ExpectTwins("open with other arguments");
  }
  EXPECT_EQ(Call(&v1::CacheService::Stub::OpenSequence, GoodOpen("new")), Outcome{});
}

TEST_F(BadCallsTest, ReadPagesTruncateAndClose) {
  const Outcome unknown{StatusCode::NOT_FOUND, "SEQUENCE_UNKNOWN"};
  const auto read = [&](const std::string& name, uint32_t layer, uint32_t head, uint64_t first,
                        uint64_t count) {
    v1::ReadPagesRequest request;
    request.set_sequence(name);
    request.set_layer(layer);
    request.set_kv_head(head);
    request.set_first_page(first);
    request.set_page_count(count);
    return Call(&v1::CacheService::Stub::ReadPages, request);
  };
  const auto truncate = [&](const std::string& name, uint64_t length) {
    v1::TruncateRequest request;
    request.set_sequence(name);
    request.set_length(length);
    return Call(&v1::CacheService::Stub::Truncate, request);
  };
  const auto close = [&](const std::string& name) {
    v1::CloseSequenceRequest request;
    request.set_sequence(name);
    return Call(&v1::CacheService::Stub::CloseSequence, request);
  };
  ASSERT_EQ(Call(&v1::CacheService::Stub::OpenSequence, GoodOpen("gone")), Outcome{});
  ASSERT_EQ(close("gone"), Outcome{});
  constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();

  const std::pair<Outcome, Outcome> pairs[] = {
      {read("", 0, 0, 0, 0), {kInvalid, "NAME_INVALID"}},
      {read("nobody", 0, 0, 0, 0), unknown},
      {read("gone", 0, 0, 0, 0), unknown},
      {read("victim", kLayers, 0, 0, 0), {kInvalid, "LAYER_OUT_OF_RANGE"}},
      {read("victim", 0, kKvHeads, 0, 0), {kInvalid, "LANE_OUT_OF_RANGE"}},
      {read("victim", 0, 0, 5, 0), {kInvalid, "PAGE_OUT_OF_RANGE"}},
      {read("victim", 0, 0, 3, 2), {kInvalid, "PAGE_OUT_OF_RANGE"}},
      {read("victim", 0, 0, 1, kMax), {kInvalid, "PAGE_OUT_OF_RANGE"}},
      {read("victim", 0, 0, kMax, 0), {kInvalid, "PAGE_OUT_OF_RANGE"}},
      {truncate("", 0), {kInvalid, "NAME_INVALID"}},
      {truncate("nobody", 0), unknown},
      {truncate("gone", 0), unknown},
      {truncate("victim", length_ + 1), {kInvalid, "LENGTH_BEYOND_END"}},
      {truncate("victim", kMax), {kInvalid, "LENGTH_BEYOND_END"}},
      {truncate("victim", length_ - 1), {StatusCode::FAILED_PRECONDITION, "SEALED"}},
      {truncate("victim", 0), {StatusCode::FAILED_PRECONDITION, "SEALED"}},
      {close(""), {kInvalid, "NAME_INVALID"}},
      {close("nobody"), unknown},
  };
  for (size_t i = 0; i < std::size(pairs); ++i) EXPECT_EQ(pairs[i].first, pairs[i].second) << i;
  ExpectTwins("reads, truncations and closes");
}

TEST_F(BadCallsTest, PagesThatNoMessageHoldsAreRefusedBeforeTheyAreRead) {
  v1::RegisterModelRequest model = GoodModel();
  model.set_model("wide");
  model.mutable_geometry()->set_head_dim(256);
  model.mutable_geometry()->set_query_heads(1);
  model.mutable_geometry()->set_layers(1);
  model.mutable_geometry()->set_page_tokens(64);
  ASSERT_EQ(Call(&v1::CacheService::Stub::RegisterModel, model), Outcome{});
  v1::OpenSequenceRequest open = GoodOpen("long");
  open.set_model("wide");
  open.mutable_budget()->set_tokens(128);
  ASSERT_EQ(Call(&v1::CacheService::Stub::OpenSequence, open), Outcome{});
  constexpr uint64_t kTokens = 640;  // 1.25 MiB, where a message holds 1 MiB.
  for (uint64_t first = 0; first < kTokens; first += kChunk) {
    v1::AppendRequest request;
    request.set_phase(v1::PHASE_PREFILL);
    v1::AppendItem& item = *request.add_items();
    item.set_sequence("long");
    item.set_first_index(first);
    for (v1::Tensor* tensor : {item.mutable_k(), item.mutable_v()}) {
      tensor->set_dtype(v1::DTYPE_F32);
      for (const int64_t size : {kChunk, 1, 256}) tensor->add_shape(size);
      tensor->set_data(std::string(kChunk * 256 * 4, '\0'));
    }
    ASSERT_EQ(CallItem(&v1::CacheService::Stub::Append, request), Outcome{});
  }
  v1::ReadPagesRequest request;
  request.set_sequence("long");
  v1::ReadPagesResponse response;

  EXPECT_EQ(Call(&v1::CacheService::Stub::ReadPages, request, &response),
            (Outcome{StatusCode::RESOURCE_EXHAUSTED, "ANSWER_TOO_LARGE"}));
  request.set_page_count(7);
  EXPECT_EQ(Call(&v1::CacheService::Stub::ReadPages, request, &response), Outcome{});
  EXPECT_EQ(response.pages_size(), 7);
}

TEST_F(BadCallsTest, Watchers) {
  v1::ListSequencesRequest list;
  list.set_page_size(1001);
  EXPECT_EQ(Call(&v1::StatsService::Stub::ListSequences, list),
            (Outcome{kInvalid, "PAGE_SIZE_TOO_LARGE"}));
  list.set_page_size(0);
  list.set_page_token("nonsense");
  EXPECT_EQ(Call(&v1::StatsService::Stub::ListSequences, list),
            (Outcome{kInvalid, "PAGE_TOKEN_UNKNOWN"}));
  v1::DescribeSequenceRequest describe;
  EXPECT_EQ(Call(&v1::StatsService::Stub::DescribeSequence, describe),
            (Outcome{kInvalid, "NAME_INVALID"}));
  describe.set_sequence("nobody");
  EXPECT_EQ(Call(&v1::StatsService::Stub::DescribeSequence, describe),
            (Outcome{StatusCode::NOT_FOUND, "SEQUENCE_UNKNOWN"}));
  describe.set_sequence("victim");
  describe.set_with_tokens(true);
  describe.set_layer(kLayers);
  EXPECT_EQ(Call(&v1::StatsService::Stub::DescribeSequence, describe),
            (Outcome{kInvalid, "LANE_OUT_OF_RANGE"}));
  describe.set_layer(0);
  describe.set_kv_head(kKvHeads);
  EXPECT_EQ(Call(&v1::StatsService::Stub::DescribeSequence, describe),
            (Outcome{kInvalid, "LANE_OUT_OF_RANGE"}));
  ExpectTwins("watchers");
}

// A worker that got no answer sends every call twice; its twin sends each once.
TEST_F(BadCallsTest, EveryMutatingCallMayBeSentAgain) {
  EXPECT_EQ(Call(&v1::CacheService::Stub::RegisterModel, GoodModel()), Outcome{});
  v1::OpenSequenceResponse opened;
  EXPECT_EQ(Call(&v1::CacheService::Stub::OpenSequence, GoodOpen("victim"), &opened), Outcome{});
  EXPECT_EQ(opened.length(), length_);
  ExpectTwins("open again");

  for (int layer = 0; layer < kLayers; ++layer) {
    v1::AttendRequest attend;
    attend.set_layer(static_cast<uint32_t>(layer));
    attend.set_phase(v1::PHASE_DECODE);
    *attend.add_items() = GoodItem<v1::AttendItem>("victim", layer, length_, 3);
    v1::AttendResponse first, again, twin;
    ASSERT_EQ(Call(&v1::CacheService::Stub::Attend, attend, &first), Outcome{});
    ASSERT_EQ(Call(&v1::CacheService::Stub::Attend, attend, &again), Outcome{});
    attend.mutable_items(0)->set_sequence("twin");
    ASSERT_EQ(Call(&v1::CacheService::Stub::Attend, attend, &twin), Outcome{});
    EXPECT_FALSE(first.results(0).replayed());
    EXPECT_TRUE(again.results(0).replayed());
    EXPECT_EQ(again.results(0).output().data(), first.results(0).output().data());
    EXPECT_EQ(again.results(0).length(), twin.results(0).length());
  }
  length_ += 3;
  ExpectTwins("attend again");

  for (int layer = 0; layer < kLayers; ++layer) {
    v1::AppendRequest append;
    append.set_layer(static_cast<uint32_t>(layer));
    append.set_phase(v1::PHASE_DECODE);
    *append.add_items() = GoodItem<v1::AppendItem>("victim", layer, length_, 2);
    v1::AppendResponse again;
    ASSERT_EQ(CallItem(&v1::CacheService::Stub::Append, append), Outcome{});
    ASSERT_EQ(Call(&v1::CacheService::Stub::Append, append, &again), Outcome{});
    append.mutable_items(0)->set_sequence("twin");
    ASSERT_EQ(CallItem(&v1::CacheService::Stub::Append, append), Outcome{});
    EXPECT_TRUE(again.results(0).replayed());
    EXPECT_EQ(again.results(0).length(), length_ + 2);
  }
  length_ += 2;
  ExpectTwins("append again");

  v1::TruncateRequest truncate;
  truncate.set_length(length_ - 1);
  for (const char* name : {"victim", "victim", "twin"}) {
    truncate.set_sequence(name);
    v1::TruncateResponse truncated;
    EXPECT_EQ(Call(&v1::CacheService::Stub::Truncate, truncate, &truncated), Outcome{});
    EXPECT_EQ(truncated.length(), length_ - 1);
  }
  --length_;
  ExpectTwins("truncate again");

  v1::CloseSequenceRequest close;
  close.set_sequence("victim");
  EXPECT_EQ(Call(&v1::CacheService::Stub::CloseSequence, close), Outcome{});
  EXPECT_EQ(Call(&v1::CacheService::Stub::CloseSequence, close), Outcome{});
}

}  // namespace
}  // namespace ebbtide::test
