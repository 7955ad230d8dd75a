// SPDX-License-Identifier: Apache-2.0
//
// Each way in which Append and Attend can be wrong, to a real daemon: the exact code and reason,
// and a twin that shows that nothing changed, as in bad_calls_test.cc.

#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

#include "ebbtide/v1/cache.grpc.pb.h"
#include "tests/integration/twin_stand.h"

namespace ebbtide::test {
namespace {

using grpc::StatusCode;

constexpr StatusCode kInvalid = StatusCode::INVALID_ARGUMENT;
constexpr StatusCode kAborted = StatusCode::ABORTED;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint64_t kSequenceTokensMax = 1 << 24;

class BadStepsTest : public TwinTest {
 protected:
  // Spoils a good item in each way and expects it to be refused just so.
  template <typename Request, typename Response, typename Item>
  void ExpectRefused(grpc::Status (v1::CacheService::Stub::*method)(grpc::ClientContext*,
                                                                    const Request&, Response*),
                     const std::string& what, const Outcome& expected,
                     const std::function<void(Request&, Item&)>& spoil, int layer = 0) {
    Request request;
    request.set_layer(static_cast<uint32_t>(layer));
    request.set_phase(v1::PHASE_DECODE);
    *request.add_items() = GoodItem<Item>("victim", layer, length_, 1);
    spoil(request, *request.mutable_items(0));

    const std::string name = Request::descriptor()->name() + ", " + what;
    EXPECT_EQ(CallItem(method, request), expected) << name;
    ExpectTwins(name);
  }

  template <typename Request>
  struct BadStep {
    using Item = typename std::remove_reference_t<decltype(*std::declval<Request>().add_items())>;
    std::string what;
    Outcome expected;
    std::function<void(Request&, Item&)> spoil;
  };
  template <typename Request>
  using BadSteps = std::vector<BadStep<Request>>;

  // The call as a whole, and whose it is.
  template <typename Request, typename Item>
  BadSteps<Request> BadWholes() {
    return {
        {"no items", {kInvalid, "BATCH_SIZE"}, [](Request& r, Item&) { r.clear_items(); }},
        {"too many items",
         {kInvalid, "BATCH_SIZE"},
         [](Request& r, Item&) {
           while (r.items_size() <= 4096) r.add_items();
         }},
        {"no phase",
         {kInvalid, "PHASE_UNKNOWN"},
         [](Request& r, Item&) { r.set_phase(v1::PHASE_UNSPECIFIED); }},
        {"unknown phase",
         {kInvalid, "PHASE_UNKNOWN"},
         [](Request& r, Item&) { r.set_phase(static_cast<v1::Phase>(3)); }},
        {"prompt end in decode",
         {kInvalid, "PHASE_UNKNOWN"},
         [](Request& r, Item&) { r.set_prompt_end(true); }},
        {"layer out of range",
         {kInvalid, "LAYER_OUT_OF_RANGE"},
         [](Request& r, Item&) { r.set_layer(kLayers); }},
        {"empty name", {kInvalid, "NAME_INVALID"}, [](Request&, Item& i) { i.set_sequence(""); }},
        {"unprintable name",
         {kInvalid, "NAME_INVALID"},
         [](Request&, Item& i) { i.set_sequence("a\n"); }},
        {"unknown sequence",
         {StatusCode::NOT_FOUND, "SEQUENCE_UNKNOWN"},
         [](Request&, Item& i) { i.set_sequence("nobody"); }},
        {"closed sequence",
         {StatusCode::NOT_FOUND, "SEQUENCE_UNKNOWN"},
         [this](Request&, Item& i) {
           EXPECT_EQ(Call(&v1::CacheService::Stub::OpenSequence, GoodOpen("gone")), Outcome{});
           v1::CloseSequenceRequest close;
           close.set_sequence("gone");
           EXPECT_EQ(Call(&v1::CacheService::Stub::CloseSequence, close), Outcome{});
           i.set_sequence("gone");
         }},
        {"one sequence twice",
         {kInvalid, "SEQUENCE_REPEATED"},
         [](Request& r, Item&) { *r.add_items() = r.items(0); }},
    };
  }

  // What is there of k and v, and its shape.
  template <typename Request, typename Item>
  BadSteps<Request> BadShapes() {
    return {
        {"k without v", {kInvalid, "TENSORS_MISSING"}, [](Request&, Item& i) { i.clear_v(); }},
        {"v without k", {kInvalid, "TENSORS_MISSING"}, [](Request&, Item& i) { i.clear_k(); }},
        {"two axes",
         {kInvalid, "SHAPE_MISMATCH"},
         [](Request&, Item& i) { i.mutable_k()->mutable_shape()->RemoveLast(); }},
        {"no tokens",
         {kInvalid, "SHAPE_MISMATCH"},
         [](Request&, Item& i) {
           i.mutable_k()->set_shape(0, 0);
           i.mutable_k()->clear_data();
         }},
        {"negative size",
         {kInvalid, "SHAPE_MISMATCH"},
         [](Request&, Item& i) { i.mutable_k()->set_shape(0, -1); }},
        {"more heads than the model",
         {kInvalid, "SHAPE_MISMATCH"},
         [](Request&, Item& i) {
           i.mutable_v()->set_shape(1, 2);
           i.mutable_v()->mutable_data()->append(kHeadDim * 4, '\0');
         }},
        {"other channels than the model",
         {kInvalid, "SHAPE_MISMATCH"},
         [](Request&, Item& i) {
           i.mutable_v()->set_shape(2, kHeadDim - 1);
           i.mutable_v()->mutable_data()->resize((kHeadDim - 1) * 4);
         }},
        {"k and v of different lengths",
         {kInvalid, "SHAPE_MISMATCH"},
         [this](Request&, Item& i) {
           i.mutable_v()->Clear();
           FillTensor(*i.mutable_v(), 2, length_, 2, 0, kKvHeads);
         }},
    };
  }

  // What k and v hold.
  template <typename Request, typename Item>
  BadSteps<Request> BadContents() {
    return {
        {"a byte too few",
         {kInvalid, "SIZE_MISMATCH"},
         [](Request&, Item& i) { i.mutable_k()->mutable_data()->pop_back(); }},
        {"a byte too many",
         {kInvalid, "SIZE_MISMATCH"},
         [](Request&, Item& i) { i.mutable_v()->mutable_data()->push_back('\0'); }},
        {"no dtype",
         {kInvalid, "DTYPE_UNKNOWN"},
         [](Request&, Item& i) { i.mutable_k()->clear_dtype(); }},
        {"unknown dtype",
         {kInvalid, "DTYPE_UNKNOWN"},
         [](Request&, Item& i) { i.mutable_v()->set_dtype(static_cast<v1::Dtype>(9)); }},
        {"another dtype than the model's",
         {kInvalid, "DTYPE_MISMATCH"},
         [](Request&, Item& i) {
           i.mutable_k()->set_dtype(v1::DTYPE_F16);
           i.mutable_k()->mutable_data()->resize(kHeadDim * 2);
         }},
        {"NaN in k",
         {kInvalid, "NOT_FINITE"},
         [](Request&, Item& i) { SetFloat(*i.mutable_k(), kHeadDim - 1, kNaN); }},
        {"infinity in v",
         {kInvalid, "NOT_FINITE"},
         [](Request&, Item& i) { SetFloat(*i.mutable_v(), 0, kInfinity); }},
        {"minus infinity in v",
         {kInvalid, "NOT_FINITE"},
         [](Request&, Item& i) { SetFloat(*i.mutable_v(), 0, -kInfinity); }},
    };
  }

  // Where the tokens go, and how many they are.
  template <typename Request, typename Item>
  BadSteps<Request> BadPlaces() {
    return {
        {"a position too many",
         {kInvalid, "POSITIONS_MISMATCH"},
         [](Request&, Item& i) {
           i.add_positions(0);
           i.add_positions(1);
         }},
        {"a gap",
         {kAborted, "INDEX_GAP"},
         [this](Request&, Item& i) { i.set_first_index(length_ + 1); }},
        {"an index beyond what a sequence may have",
         {kInvalid, "SEQUENCE_TOO_LONG"},
         [](Request&, Item& i) { i.set_first_index(kSequenceTokensMax); }},
        {"the largest index",
         {kInvalid, "SEQUENCE_TOO_LONG"},
         [](Request&, Item& i) { i.set_first_index(std::numeric_limits<uint64_t>::max()); }},
        {"tokens from before the end",
         {kAborted, "INDEX_CONFLICT"},
         [this](Request&, Item& i) { i = GoodItem<Item>("victim", 0, length_ - 2, 1); }},
        {"the last call with one byte changed",
         {kAborted, "INDEX_CONFLICT"},
         [this](Request&, Item& i) {
           i = GoodItem<Item>("victim", 0, length_ - 1, 1);
           i.mutable_k()->mutable_data()->at(0) ^= 1;
         }},
        {"more tokens than were said at open",
         {kInvalid, "TOO_MANY_TOKENS"},
         [this](Request&, Item& i) { i = GoodItem<Item>("victim", 0, length_, kChunk + 1); }},
        {"a message over the limit",
         {StatusCode::RESOURCE_EXHAUSTED, "MESSAGE_TOO_LARGE"},
         [](Request&, Item& i) { i.mutable_k()->mutable_data()->append(1 << 20, '\0'); }},
    };
  }

  // What both kinds of step refuse alike.
  template <typename Item, typename Request, typename Response>
  void ExpectBadStepsRefused(grpc::Status (v1::CacheService::Stub::*method)(grpc::ClientContext*,
                                                                            const Request&,
                                                                            Response*)) {
    for (const auto& cases : {BadWholes<Request, Item>(), BadShapes<Request, Item>(),
                              BadContents<Request, Item>(), BadPlaces<Request, Item>()}) {
      for (const BadStep<Request>& bad : cases) {
        ExpectRefused<Request, Response, Item>(method, bad.what, bad.expected, bad.spoil);
      }
    }
    // A step that only the other layer has begun.
    ExpectRefused<Request, Response, Item>(
        method, "a token before the layer's own end in another layer",
        {StatusCode::ABORTED, "INDEX_CONFLICT"},
        [this](Request&, Item& i) { i = GoodItem<Item>("victim", 1, length_ - 3, 2); }, 1);
  }
};

TEST_F(BadStepsTest, Append) {
  ExpectBadStepsRefused<v1::AppendItem>(&v1::CacheService::Stub::Append);
}

TEST_F(BadStepsTest, Attend) {
  using Request = v1::AttendRequest;
  using Item = v1::AttendItem;
  const auto method = &v1::CacheService::Stub::Attend;
  ExpectBadStepsRefused<Item>(method);

  const auto refused = [&](const std::string& what, const Outcome& expected,
                           const std::function<void(Request&, Item&)>& spoil) {
    ExpectRefused<Request, v1::AttendResponse, Item>(method, what, expected, spoil);
  };
  refused("no q", {kInvalid, "TENSORS_MISSING"}, [](Request&, Item& i) { i.clear_q(); });
  refused("q of other heads", {kInvalid, "SHAPE_MISMATCH"}, [](Request&, Item& i) {
    i.mutable_q()->set_shape(1, 1);
    i.mutable_q()->mutable_data()->resize(kHeadDim * 4);
  });
  refused("q of other length than k", {kInvalid, "SHAPE_MISMATCH"}, [this](Request&, Item& i) {
    i.mutable_q()->Clear();
    FillTensor(*i.mutable_q(), 3, length_, 2, 0, kQueryHeads);
  });
  refused("NaN in q", {kInvalid, "NOT_FINITE"},
          [](Request&, Item& i) { SetFloat(*i.mutable_q(), 3, kNaN); });
  refused("infinity in q", {kInvalid, "NOT_FINITE"},
          [](Request&, Item& i) { SetFloat(*i.mutable_q(), 3, -kInfinity); });
  refused("unknown output dtype", {kInvalid, "DTYPE_UNKNOWN"},
          [](Request&, Item& i) { i.set_output_dtype(static_cast<v1::Dtype>(77)); });
  refused("queries of tokens to come", {StatusCode::ABORTED, "INDEX_GAP"}, [](Request&, Item& i) {
    i.clear_k();
    i.clear_v();
  });
  refused("queries of the largest index", {kInvalid, "SEQUENCE_TOO_LONG"}, [](Request&, Item& i) {
    i.clear_k();
    i.clear_v();
    i.set_first_index(std::numeric_limits<uint64_t>::max());
  });
}

TEST_F(BadStepsTest, BlockwisePrefillTakesNoMoreThanItsBlock) {
  v1::OpenSequenceRequest open = GoodOpen("blockwise");
  open.set_prefill("blockwise(8)");
  ASSERT_EQ(Call(&v1::CacheService::Stub::OpenSequence, open), Outcome{});
  v1::AppendRequest request;
  request.set_phase(v1::PHASE_PREFILL);
  *request.add_items() = GoodItem<v1::AppendItem>("blockwise", 0, 0, 9);

  EXPECT_EQ(CallItem(&v1::CacheService::Stub::Append, request),
            (Outcome{StatusCode::INVALID_ARGUMENT, "TOO_MANY_TOKENS"}));
}

}  // namespace
}  // namespace ebbtide::test
