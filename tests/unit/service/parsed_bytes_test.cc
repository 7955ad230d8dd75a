// SPDX-License-Identifier: Apache-2.0

#include "service/rpc/parsed_bytes.h"

#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "google/protobuf/message.h"
#include "gtest/gtest.h"

#include "ebbtide/v1/cache.pb.h"
#include "ebbtide/v1/stats.pb.h"
#include "service/rpc/raw_service.h"
#include "tests/support/random_seed.h"
#include "tests/support/repeated.h"

namespace ebbtide::service {
namespace {

using test::Repeated;
using testing::Optional;

constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();

template <typename Request>
const MessageLayout& LayoutOf() {
  static const MessageLayout* const layout = new MessageLayout(*Request::descriptor());
  return *layout;
}

// In slices of `slice_bytes`, as gRPC brings them.
template <typename Request>
std::optional<uint64_t> ParsedBytes(const std::string& bytes, int slice_bytes = 1 << 14) {
  const auto size = static_cast<int>(bytes.size());
  google::protobuf::io::ArrayInputStream stream(bytes.data(), size, slice_bytes);
  return LayoutOf<Request>().ParsedBytes(stream, size, kNoLimit);
}

std::string Delimited(char tag, const std::string& bytes) {
  std::string head(1, tag);
  size_t size = bytes.size();
  for (; size >= 128; size /= 128) head += static_cast<char>(size % 128 + 128);
  return head + static_cast<char>(size) + bytes;
}

// Field numbers of cache.proto and types.proto, with the wire type in the low bits.
constexpr char kItems = 4 << 3 | 2;
constexpr char kKeys = 3 << 3 | 2;
constexpr char kShape = 2 << 3 | 2;
constexpr char kPositions = 5 << 3 | 2;
constexpr char kUnpackedPosition = 5 << 3;
// Fields that no message has.
constexpr char kUnknownNumber = 14 << 3;
constexpr char kUnknownText = 14 << 3 | 2;
constexpr char kUnknownFixed = 14 << 3 | 5;
constexpr char kUnknownGroup = 14 << 3 | 3;
constexpr char kUnknownGroupEnd = 14 << 3 | 4;

// Fields of all kinds, some of them unknown, a few of them often.
std::string RandomFields(std::mt19937_64& random, int depth);

std::string RandomField(std::mt19937_64& random, int depth) {
  const auto tag = static_cast<char>((random() % 9 + 1) << 3);
  const auto fixed = [](char of, size_t bytes) { return of + std::string(bytes, '\3'); };
  const auto text = [&] { return std::string(random() % 40, 'a'); };
  const auto fields = [&] { return depth < 4 ? RandomFields(random, depth + 1) : text(); };
  switch (random() % 8) {
    case 0:
      return {tag, static_cast<char>(random() % 128)};
    case 1:
      return Delimited(static_cast<char>(tag | 2), text());
    case 2:
      return fixed(static_cast<char>(tag | 1), 8);
    case 3:
      return fixed(static_cast<char>(tag | 5), 4);
    case 4:
      return Repeated({kUnknownNumber, 1}, random() % 20);
    case 5:
      return kUnknownGroup + fields() + kUnknownGroupEnd;
    default:
      return Delimited(static_cast<char>(tag | 2), fields());
  }
}

std::string RandomFields(std::mt19937_64& random, int depth) {
  std::string fields;
  for (uint64_t i = random() % 6; i > 0; --i) {
    fields += Repeated(RandomField(random, depth), random() % 8 == 0 ? 5 : 1);
  }
  return fields;
}

template <typename Request>
void ExpectNoLessThanProtobufSays(const std::string& bytes) {
  const google::protobuf::LogSilencer no_complaints;
  Request message;
  const bool is_message = message.ParseFromString(bytes);
  const std::optional<uint64_t> parsed_bytes = ParsedBytes<Request>(bytes);
  if (is_message) {
    ASSERT_TRUE(parsed_bytes.has_value()) << message.DebugString();
    EXPECT_GE(*parsed_bytes, message.SpaceUsedLong()) << message.DebugString();
  }
  EXPECT_EQ(ParsedBytes<Request>(bytes, 1), parsed_bytes);
  EXPECT_EQ(ParsedBytes<Request>(bytes, 7), parsed_bytes);
}

TEST(ParsedBytesTest, RandomMessageTakesNoMore) {
  const google::protobuf::LogSilencer no_complaints;
  int all = 0;
  int messages = 0;
  test::ForEachSeed(20, [&](uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < 200; ++i) {
      const std::string bytes = RandomFields(random, 0);
      ExpectNoLessThanProtobufSays<v1::AppendRequest>(bytes);
      ExpectNoLessThanProtobufSays<v1::AttendRequest>(bytes);
      ExpectNoLessThanProtobufSays<v1::OpenSequenceRequest>(bytes);
      ExpectNoLessThanProtobufSays<v1::RegisterModelRequest>(bytes);
      ExpectNoLessThanProtobufSays<v1::ListSequencesRequest>(bytes);
      messages += v1::AttendRequest().ParseFromString(bytes) ? 1 : 0;
      ++all;
    }
  });
  EXPECT_GT(messages, all / 10);
}

// What the smallest fields take shows at once that there are many: no honest message has so many.
TEST(ParsedBytesTest, SmallFieldsCountAsWhatTheyBecome) {
  constexpr int kTimes = 1000;
  const std::string kinds[] = {
      {kItems, 0},
      {kUnknownNumber, 0},
      {kUnknownText, 0},
      {kUnknownGroup, kUnknownGroupEnd},
      std::string(1, kUnknownFixed) + std::string(4, '\0'),
  };
  for (const std::string& kind : kinds) {
    const std::string bytes = Repeated(kind, kTimes);
    v1::AttendRequest message;
    ASSERT_TRUE(message.ParseFromString(bytes));

    const std::optional<uint64_t> parsed_bytes = ParsedBytes<v1::AttendRequest>(bytes);

    ASSERT_TRUE(parsed_bytes.has_value());
    EXPECT_GE(*parsed_bytes, message.SpaceUsedLong());
    EXPECT_GE(*parsed_bytes, kTimes * 80);
    EXPECT_LE(*parsed_bytes, kTimes * 400);
  }
}

TEST(ParsedBytesTest, NumbersCountAlikePackedAndUnpacked) {
  const std::string unpacked = Repeated({kUnpackedPosition, 1}, 1000);
  const std::string packed = Delimited(kPositions, std::string(1000, '\1'));
  const std::string long_ones = Delimited(kPositions, Repeated("\x81\x01", 1000));

  const auto of_positions = [](const std::string& positions) {
    const std::string bytes = Delimited(kItems, positions);
    v1::AppendRequest message;
    EXPECT_TRUE(message.ParseFromString(bytes));
    EXPECT_EQ(message.items(0).positions_size(), 1000);
    const std::optional<uint64_t> parsed_bytes = ParsedBytes<v1::AppendRequest>(bytes);
    EXPECT_GE(parsed_bytes.value_or(0), message.SpaceUsedLong());
    return parsed_bytes;
  };

  EXPECT_THAT(of_positions(packed),
              Optional(testing::AllOf(testing::Ge(16'000), testing::Le(17'000))));
  EXPECT_EQ(of_positions(unpacked), of_positions(packed));
  EXPECT_EQ(of_positions(long_ones), of_positions(packed));
}

TEST(ParsedBytesTest, FieldsOfATensorOfAnItemCount) {
  const std::string shape = Delimited(kShape, std::string(1000, '\1'));

  EXPECT_GE(ParsedBytes<v1::AttendRequest>(Delimited(kItems, Delimited(kKeys, shape))), 16'000);
}

TEST(ParsedBytesTest, BytesOfATensorCountOnce) {
  v1::AppendRequest message;
  message.add_items()->mutable_k()->set_data(std::string(1 << 20, 'x'));

  EXPECT_THAT(ParsedBytes<v1::AppendRequest>(message.SerializeAsString()),
              Optional(testing::AllOf(testing::Ge(1 << 20), testing::Le((1 << 20) + 2000))));
}

TEST(ParsedBytesTest, LooksNoFurtherThanItMust) {
  const std::string bytes = Repeated({kItems, 0}, 1 << 19);
  const auto size = static_cast<int>(bytes.size());
  google::protobuf::io::ArrayInputStream stream(bytes.data(), size, 1024);

  const std::optional<uint64_t> parsed_bytes =
      LayoutOf<v1::AppendRequest>().ParsedBytes(stream, size, 100'000);

  EXPECT_THAT(parsed_bytes, Optional(testing::AllOf(testing::Gt(100'000), testing::Lt(101'000))));
  EXPECT_LT(stream.ByteCount(), 4096);
}

// Every limit reached at one time: the items of a call, tokens of an item, the smallest model.
TEST(ParsedBytesTest, FullestHonestCallStaysWithinItsLimit) {
  v1::AttendRequest message;
  message.set_phase(v1::PHASE_PREFILL);
  for (int i = 0; i < 4096; ++i) {
    v1::AttendItem& item = *message.add_items();
    item.set_sequence(std::to_string(i));
    item.set_first_index(1);
    item.set_output_dtype(v1::DTYPE_F32);
    item.set_require_met(true);
    for (v1::Tensor* tensor : {item.mutable_q(), item.mutable_k(), item.mutable_v()}) {
      tensor->set_dtype(v1::DTYPE_F16);
      for (const int64_t size : {512, 1, 1}) tensor->add_shape(size);
      tensor->set_data(std::string(1024, '\0'));
    }
    for (int token = 0; token < 512; ++token) item.add_positions(token);
  }
  const std::string bytes = message.SerializeAsString();

  EXPECT_LT(ParsedBytes<v1::AttendRequest>(bytes),
            kParsedTimesMax * bytes.size() + kParsedBytesBesides);

  // One token each, and no positions said.
  for (v1::AttendItem& item : *message.mutable_items()) {
    item.clear_positions();
    for (v1::Tensor* tensor : {item.mutable_q(), item.mutable_k(), item.mutable_v()}) {
      tensor->set_shape(0, 1);
      tensor->set_data(std::string(2, '\0'));
    }
  }
  EXPECT_LT(ParsedBytes<v1::AttendRequest>(message.SerializeAsString()), kParsedBytesBesides);
}

TEST(ParsedBytesTest, WhatNoParserTakesIsNoMessage) {
  const std::string cases[] = {
      {kItems},                                           // Cut off behind a tag,
      {kItems, 5, 1},                                     // within a message,
      {kUnknownNumber},                                   // a number,
      {kUnknownNumber, '\x80'},                           //
      {kUnknownFixed, 1, 2},                              //
      {kUnknownText, 3, 1},                               // a text,
      {'\x80'},                                           // a tag,
      {kUnknownGroup, kUnknownNumber, 1},                 // a group.
      {kUnknownGroup, 13 << 3 | 4},                       // The end of another group than began,
      {kUnknownGroupEnd},                                 // or of none.
      {0, 0},                                             // Field 0,
      {2, 0},                                             //
      {14 << 3 | 6, 0},                                   // and kinds that there are not.
      {14 << 3 | 7, 0},                                   //
      Delimited(kItems, {kKeys, 1}),                      // A message longer than what it is in,
      Delimited(kItems, {kPositions, 1, '\x80'}) + '\1',  // a number,
      Delimited(kItems, {kUnknownGroup}) + kUnknownGroupEnd,                 // a group.
      std::string(101, kUnknownGroup) + std::string(101, kUnknownGroupEnd),  // Too deep.
      {kItems, '\xff', '\xff', '\xff', '\xff', '\x0f'},  // A length of all that there is.
  };
  for (const std::string& bytes : cases) {
    EXPECT_EQ(ParsedBytes<v1::AppendRequest>(bytes), std::nullopt) << testing::PrintToString(bytes);
    EXPECT_FALSE(v1::AppendRequest().ParseFromString(bytes)) << testing::PrintToString(bytes);
  }
}

TEST(ParsedBytesTest, WhatParsersTakeIsAMessage) {
  const std::string cases[] = {
      "",
      {'\xa2', 0, 0},                                  // A tag of two bytes.
      {kUnknownNumber, '\x81', '\x80', '\x80', '\0'},  // A number of more than it needs.
      std::string(90, kUnknownGroup) + std::string(90, kUnknownGroupEnd),
      Delimited(kItems, Delimited(kKeys, "") + Delimited(kKeys, "")),  // Merged into one.
      {kItems & ~7, 1},      // A number where items belong.
      {1 << 3 | 2, 1, 'x'},  // A text where a number does.
  };
  for (const std::string& bytes : cases) {
    EXPECT_TRUE(v1::AppendRequest().ParseFromString(bytes)) << testing::PrintToString(bytes);
    ExpectNoLessThanProtobufSays<v1::AppendRequest>(bytes);
  }
}

}  // namespace
}  // namespace ebbtide::service
