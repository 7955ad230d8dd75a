// SPDX-License-Identifier: Apache-2.0
//
// The trace reader: what it reads, and that it refuses everything else by name.

#include "client/cli/trace.h"

#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <ios>
#include <istream>
#include <random>
#include <sstream>
#include <stop_token>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

#include "tests/support/random_seed.h"
#include "tests/support/status_matchers.h"
#include "tests/support/temp_folder.h"
#include "tests/unit/client/synthetic_trace.h"

namespace ebbtide::cli {
namespace {

using absl::StatusCode;
using test::StatusIs;
using testing::HasSubstr;

class TraceTest : public testing::Test {
 protected:
  // Expects the file to be refused with a message that names `what`.
  void ExpectRefused(const std::string& what) const {
    EXPECT_THAT(ParseTrace(file_.Bytes(), {}),
                StatusIs(StatusCode::kInvalidArgument, HasSubstr(what)));
  }

  SyntheticFile file_ = MakeSyntheticFile({});
};

TEST_F(TraceTest, EveryFieldIsRead) {
  ASSERT_OK_AND_ASSIGN(const Trace trace, ParseTrace(file_.Bytes(), {}));

  EXPECT_EQ(trace.model, "synthetic");
  EXPECT_EQ(trace.tokens, 40U);
  EXPECT_EQ(trace.prompt_length, 24U);
  EXPECT_EQ(trace.query_heads, 4U);
  EXPECT_EQ(trace.kv_heads, 2U);
  EXPECT_EQ(trace.head_dim, 8U);
  EXPECT_EQ(trace.scale, 0.35F);
  EXPECT_EQ(trace.dtype(), client::Dtype::kF16);
  ASSERT_EQ(trace.layers.size(), 2U);
  EXPECT_EQ(trace.layers[1].layer, 7U);
  EXPECT_EQ(trace.layers[1].q.dtype, client::Dtype::kF32);
  EXPECT_EQ(trace.kv_bytes(), 2U * 40 * 2 * 8 * 2 * 2);
}

TEST_F(TraceTest, LayersAreReadInTheOrderAskedFor) {
  const std::vector<uint32_t> layers = {7, 3};

  ASSERT_OK_AND_ASSIGN(const Trace trace, ParseTrace(file_.Bytes(), layers));

  ASSERT_EQ(trace.layers.size(), 2U);
  EXPECT_EQ(trace.layers[0].layer, 7U);
  EXPECT_EQ(trace.layers[1].layer, 3U);
}

TEST_F(TraceTest, ALayerThatIsNotRecordedIsRefused) {
  const std::vector<uint32_t> layers = {4};

  EXPECT_THAT(
      ParseTrace(file_.Bytes(), layers),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("layer 4 is not recorded; it has 3, 7")));
}

TEST_F(TraceTest, AViewIsTheTokensBytesAsStored) {
  ASSERT_OK_AND_ASSIGN(const Trace trace, ParseTrace(file_.Bytes(), {}));
  const TraceTensor& k = trace.layers[0].k;

  const client::TensorView view = k.View(5, 2);

  EXPECT_THAT(view.shape, testing::ElementsAre(2, 2, 8));
  EXPECT_EQ(view.bytes.size(), 2U * 2 * 8 * 2);
  EXPECT_EQ(view.bytes.data(), k.bytes.data() + 5 * 2 * 8 * 2);
  EXPECT_EQ(k.Row(5, 1).data(), view.bytes.data() + 8 * 2);
}

TEST_F(TraceTest, HalvesWidenWithoutLoss) {
  const std::vector<std::pair<uint16_t, float>> cases = {
      {0x0000, 0.0F},     {0x3C00, 1.0F},     {0xC000, -2.0F},       {0x7BFF, 65504.0F},
      {0x0400, 0x1p-14F}, {0x0001, 0x1p-24F}, {0x83FF, -0x3FFp-24F}, {0x3555, 0x1.554p-2F}};
  TraceTensor tensor{.dtype = client::Dtype::kF16, .heads = 1, .head_dim = 1};
  for (const auto& [half, value] : cases) {
    tensor.bytes.resize(2);
    std::memcpy(tensor.bytes.data(), &half, 2);

    EXPECT_EQ(tensor.ToFloats().front(), value) << half;
  }
}

TEST_F(TraceTest, Bf16WidensWithoutLoss) {
  const std::vector<std::pair<uint16_t, float>> cases = {
      {0x3F80, 1.0F}, {0xC0A0, -5.0F}, {0x7F7F, 0x1.FEp127F}, {0x0001, 0x1p-133F}};
  TraceTensor tensor{.dtype = client::Dtype::kBF16, .heads = 1, .head_dim = 1};
  for (const auto& [bits, value] : cases) {
    tensor.bytes.resize(2);
    std::memcpy(tensor.bytes.data(), &bits, 2);

    EXPECT_EQ(tensor.ToFloats().front(), value) << bits;
  }
}

TEST_F(TraceTest, AnUnknownDtypeIsRefused) {
  file_.header["layer3.k"]["dtype"] = "F8_E4M3";

  ExpectRefused("layer3.k has dtype F8_E4M3; f32, f16 and bf16 are understood");
}

TEST_F(TraceTest, KeysAndValuesOfDifferentDtypesAreRefused) {
  file_.header["layer3.k"]["dtype"] = "F32";
  file_.header["layer3.k"]["data_offsets"] = {0, 40 * 2 * 8 * 4};

  ExpectRefused("must share one dtype");
}

TEST_F(TraceTest, AnotherFormatIsRefused) {
  file_.header["__metadata__"]["format"] = "ebbtide.trace.v2";

  ExpectRefused("its format is \"ebbtide.trace.v2\", not ebbtide.trace.v1");
}

TEST_F(TraceTest, AMissingTensorIsNamed) {
  file_.header.erase("layer7.v");

  ExpectRefused("there is no tensor layer7.v");
}

TEST_F(TraceTest, AMissingFieldIsNamed) {
  for (const char* field : {"format", "model", "text", "layers", "query_heads", "kv_heads",
                            "head_dim", "scale", "prompt_length"}) {
    file_ = MakeSyntheticFile({});
    file_.header["__metadata__"].erase(field);

    ExpectRefused("__metadata__ has no text \"" + std::string(field) + "\"");
  }
}

TEST_F(TraceTest, NumbersOutOfRangeAreRefused) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"query_heads", "0"},     {"query_heads", "99999999999"},
      {"kv_heads", "3"},        {"head_dim", "257"},
      {"scale", "-1"},          {"scale", "nan"},
      {"prompt_length", "41"},  {"layers", "[-1]"},
      {"layers", "[]"},         {"layers", "[1.5]"},
      {"layers", "not a list"}, {"layers", "[3, 3]"}};
  for (const auto& [field, value] : cases) {
    file_ = MakeSyntheticFile({});
    file_.header["__metadata__"][field] = value;

    EXPECT_THAT(ParseTrace(file_.Bytes(), {}), StatusIs(StatusCode::kInvalidArgument))
        << field << " = " << value;
  }
}

TEST_F(TraceTest, AShapeThatIsNotTheModelsIsRefused) {
  file_.header["layer7.v"]["shape"] = {40, 1, 16};

  ExpectRefused("layer7.v has shape [40, 1, 16], not [40, 2, 8]");
}

TEST_F(TraceTest, OffsetsBeyondTheFileAreRefused) {
  file_.header["layer7.v"]["data_offsets"] = {uint64_t{1} << 62, (uint64_t{1} << 62) + 1280};

  ExpectRefused("layer7.v lies at");
}

TEST_F(TraceTest, OffsetsThatDoNotFitTheShapeAreRefused) {
  file_.header["layer7.v"]["data_offsets"] = {0, 8};

  ExpectRefused("its shape takes 1280 bytes");
}

TEST_F(TraceTest, AShapeWhoseProductOverflowsIsRefused) {
  file_.header["layer3.q"]["shape"] = {uint64_t{1} << 40, uint64_t{1} << 40, uint64_t{1} << 40};

  ExpectRefused("extent 0 must be 1 to");
}

TEST_F(TraceTest, ANaNIsNamedWithItsPlace) {
  const auto begin = file_.header["layer7.v"]["data_offsets"][0].get<size_t>();
  const uint16_t nan = 0x7E00;
  std::memcpy(file_.data.data() + begin + (11 * 16 + 8 + 2) * 2, &nan, 2);

  ExpectRefused("layer7.v holds nan at token 11, head 1, channel 2");
}

TEST_F(TraceTest, AHeaderLongerThanTheFileIsRefused) {
  std::vector<std::byte> bytes = file_.Bytes();
  bytes[7] = std::byte{0x7F};

  EXPECT_THAT(ParseTrace(bytes, {}),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("the header claims")));
}

TEST_F(TraceTest, AKeyTwiceIsRefused) {
  std::string header = file_.header.dump();
  header.insert(1, R"("layer3.q":{},)");

  EXPECT_THAT(ParseTrace(FileBytes(header, file_.data), {}),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("names \"layer3.q\" twice")));
}

TEST_F(TraceTest, WhatIsNoJsonIsRefused) {
  for (const char* header : {"", "[]", "{", "null", "{\"a\":}", "\xff\xfe"}) {
    EXPECT_THAT(ParseTrace(FileBytes(header, {}), {}), StatusIs(StatusCode::kInvalidArgument))
        << header;
  }
}

TEST_F(TraceTest, EveryCutIsRefused) {
  const std::vector<std::byte> bytes = file_.Bytes();
  // Every length within the header, then in steps: each cut takes the last tensor's end away.
  for (size_t size = 0; size < bytes.size(); size += size < 2000 ? 1 : 97) {
    EXPECT_THAT(ParseTrace(std::span(bytes).first(size), {}),
                StatusIs(StatusCode::kInvalidArgument))
        << size;
  }
}

TEST_F(TraceTest, FlippedHeaderBytesAreReadSafely) {
  const std::vector<std::byte> bytes = file_.Bytes();
  std::mt19937_64 random(test::RandomSeed());
  for (int i = 0; i < 2000; ++i) {
    std::vector<std::byte> damaged = bytes;
    damaged[random() % 1500] = static_cast<std::byte>(random());

    const absl::StatusOr<Trace> trace = ParseTrace(damaged, {});

    // Whatever is accepted is whole.
    if (trace.ok()) {
      for (const TraceLayer& layer : trace->layers) {
        EXPECT_EQ(layer.k.bytes.size(), trace->tokens * layer.k.token_bytes());
      }
    }
  }
}

TEST_F(TraceTest, AFileOnDiskIsReadAndNamedInErrors) {
  const test::TempFolder folder;
  const std::string path = (folder.path() / "t.safetensors").string();
  const std::vector<std::byte> bytes = file_.Bytes();
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(bytes.data()), static_cast<int64_t>(bytes.size()));
  const std::vector<uint32_t> unknown = {9};

  EXPECT_OK(ReadTrace(path, {}));
  EXPECT_THAT(ReadTrace(path, unknown), StatusIs(StatusCode::kInvalidArgument, HasSubstr(path)));
  EXPECT_THAT(ReadTrace(path + ".none", {}),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("No such file")));
  std::stop_source stop;
  stop.request_stop();
  EXPECT_THAT(ReadTrace(path, {}, stop.get_token()), StatusIs(StatusCode::kCancelled));

  ASSERT_OK_AND_ASSIGN(const Trace whole, ReadTrace(path, {}));
  ASSERT_OK_AND_ASSIGN(const Trace header, ReadTraceHeader(path, {}));
  EXPECT_EQ(header.tokens, whole.tokens);
  EXPECT_EQ(header.kv_bytes(), whole.kv_bytes());
  EXPECT_EQ(header.layers.size(), whole.layers.size());
  EXPECT_TRUE(header.layers[0].k.bytes.empty());
}

TEST_F(TraceTest, WhatIsNoRegularFileIsRefusedAsSuch) {
  const test::TempFolder folder;
  const std::string pipe = (folder.path() / "pipe").string();
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);

  EXPECT_THAT(
      ReadTrace(folder.path().string(), {}),
      StatusIs(StatusCode::kInvalidArgument, "trace " + folder.path().string() + ": is a folder"));
  EXPECT_THAT(ReadTrace(pipe, {}),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr(": is no regular file")));
}

// A file as it was, of which the disk gives no more than a part.
class ShrunkFile : public std::stringbuf {
 public:
  ShrunkFile(const std::string& text, size_t left)
      : std::stringbuf(text.substr(0, left)), size_(static_cast<std::streamoff>(text.size())) {}

 protected:
  pos_type seekoff(off_type offset, std::ios::seekdir way, std::ios::openmode mode) override {
    is_at_end_ = way == std::ios::end || (is_at_end_ && way == std::ios::cur);
    return is_at_end_ ? pos_type(size_ + offset) : std::stringbuf::seekoff(offset, way, mode);
  }
  pos_type seekpos(pos_type position, std::ios::openmode mode) override {
    is_at_end_ = false;
    return std::stringbuf::seekpos(position, mode);
  }

 private:
  const std::streamoff size_;
  bool is_at_end_ = false;
};

// Which is nobody's mistake who gave the command.
TEST_F(TraceTest, WhatCannotBeReadToItsEndIsLostData) {
  const std::vector<std::byte> bytes = file_.Bytes();
  const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  for (const size_t left : {size_t{0}, size_t{100}, bytes.size() - 1}) {
    ShrunkFile shrunk(text, left);
    std::istream file(&shrunk);

    EXPECT_THAT(ReadTrace(file, {}), StatusIs(StatusCode::kDataLoss, HasSubstr("the file shrank")))
        << left;
  }
  ShrunkFile whole(text, text.size());
  std::istream file(&whole);
  EXPECT_OK(ReadTrace(file, {}));
}

}  // namespace
}  // namespace ebbtide::cli
