// SPDX-License-Identifier: Apache-2.0
//
// What goes out parses as the message that protobuf itself would have sent.

#include "client/cpp/src/encode.h"

#include <string>
#include <vector>

#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"

#include "client/cpp/src/connection.h"
#include "ebbtide/v1/cache.pb.h"

namespace ebbtide::client {
namespace {

using google::protobuf::util::MessageDifferencer;

// Bytes that differ from place to place.
std::vector<std::byte> SomeBytes(size_t count, unsigned seed) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 31 + seed + i / 251);
  return bytes;
}

template <typename Message>
Message Parsed(const Encoded& encoded) {
  Message message;
  EXPECT_TRUE(message.ParseFromArray(encoded.memory.get(), static_cast<int>(encoded.bytes)));
  return message;
}

void Expect(v1::Tensor* tensor, const TensorView& view) {
  tensor->set_dtype(static_cast<v1::Dtype>(view.dtype));
  for (const int64_t extent : view.shape) tensor->add_shape(extent);
  tensor->set_data(view.bytes.data(), view.bytes.size());
}

class EncodeTest : public testing::Test {
 protected:
  static Sequence Named(const std::string& name) { return {nullptr, name, "boot", {}}; }

  const Sequence a_ = Named("a");
  const Sequence b_ = Named("another");
  const std::vector<int64_t> positions_ = {7, 70000, -1};
  SendBuffers buffers_;
};

TEST_F(EncodeTest, AppendIsTheMessageWithItsTensors) {
  // Lengths on both sides of where a varint takes a byte more.
  for (const int64_t channels : {1, 15, 16, 31, 32, 2047, 2048, 4096, 300000}) {
    const std::vector<std::byte> k = SomeBytes(static_cast<size_t>(channels) * 4, 1);
    const std::vector<std::byte> v = SomeBytes(static_cast<size_t>(channels) * 4, 2);
    const std::vector<AppendItem> items = {
        {.sequence = &a_,
         .first_index = 300,
         .k = {Dtype::kF32, {1, 1, channels}, k},
         .v = {Dtype::kF32, {1, 1, channels}, v},
         .positions = positions_},
        {.sequence = &b_, .k = {Dtype::kF16, {2, 1, channels}, k}, .v = {}}};
    v1::AppendRequest expected;
    expected.set_layer(5);
    expected.set_phase(v1::PHASE_PREFILL);
    expected.set_prompt_end(true);
    for (const AppendItem& item : items) {
      v1::AppendItem& wire = *expected.add_items();
      wire.set_sequence(item.sequence->name());
      wire.set_first_index(item.first_index);
      Expect(wire.mutable_k(), item.k);
      Expect(wire.mutable_v(), item.v);
      wire.mutable_positions()->Add(item.positions.begin(), item.positions.end());
    }

    const Encoded encoded =
        Encode({.layer = 5, .phase = Phase::kPrefill, .prompt_end = true}, items, buffers_);

    EXPECT_TRUE(MessageDifferencer::Equals(Parsed<v1::AppendRequest>(encoded), expected))
        << channels << " channels";
  }
}

TEST_F(EncodeTest, AttendKeepsApartWhatIsAbsentAndWhatIsEmpty) {
  const std::vector<std::byte> q = SomeBytes(256, 3);
  const std::vector<std::byte> kv = SomeBytes(128, 4);
  const std::vector<AttendItem> items = {{.sequence = &a_,
                                          .first_index = 1,
                                          .q = {Dtype::kF16, {1, 2, 64}, q},
                                          .output_dtype = Dtype::kF32,
                                          .require_met = true},
                                         {.sequence = &b_,
                                          .q = {Dtype::kF16, {1, 2, 64}, q},
                                          .k = {Dtype::kF16, {1, 1, 64}, kv},
                                          .v = {Dtype::kF16, {1, 1, 64}, {}}}};
  v1::AttendRequest expected;
  expected.set_phase(v1::PHASE_DECODE);
  v1::AttendItem& first = *expected.add_items();
  first.set_sequence("a");
  first.set_first_index(1);
  Expect(first.mutable_q(), items[0].q);
  first.set_output_dtype(v1::DTYPE_F32);
  first.set_require_met(true);
  v1::AttendItem& second = *expected.add_items();
  second.set_sequence("another");
  Expect(second.mutable_q(), items[1].q);
  Expect(second.mutable_k(), items[1].k);
  Expect(second.mutable_v(), items[1].v);

  const Encoded encoded = Encode({.layer = 0, .phase = Phase::kDecode}, items, buffers_);

  EXPECT_TRUE(MessageDifferencer::Equals(Parsed<v1::AttendRequest>(encoded), expected));
}

}  // namespace
}  // namespace ebbtide::client
